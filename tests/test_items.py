"Which item is it? Its key in lists, in states that go on elsewhere, and where it stands more than once"
from collections import Counter
from pathlib import Path

import numpy as np, pandas as pd, pytest
from fastai.data.block import CategoryBlock, DataBlock, RegressionBlock, TransformBlock
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.data.transforms import ColReader, IndexSplitter, RandomSplitter, parent_label
from helpers import *
from selback.callback.items import ItemKeys
from selback.core.labels import LabelMemory, Told
from torch.utils.data import Subset, TensorDataset

KINDS = 'ant','bee','cat'

def size_of(path): return torch.tensor([float(Path(path).stat().st_size)])

def folder_of(path, n=20):
    "Files that are as large as their number"
    for i in range(3*n):
        file = path/KINDS[i%3]/f'{i}.txt'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b'x'*i)
    return path

def learner_of(dls, n_out=3, loss_func=None, **kwargs):
    set_seed(0)
    learn = Learner(dls, nn.Linear(1, n_out), loss_func=loss_func or CrossEntropyLossFlat(), lr=.01)
    return learn.watch_items(**kwargs)

def from_folder(root, seed=0, **kwargs):
    set_seed(0) # by which the loader shuffles
    def listed(path): return sorted(Path(path).rglob('*.txt'))
    block = DataBlock((TransformBlock,CategoryBlock), get_items=listed, get_x=size_of, get_y=parent_label,
        splitter=RandomSplitter(.2, seed=seed))
    return learner_of(block.dataloaders(root, path=root, bs=8, num_workers=0, drop_last=False), **kwargs)

def remembered(learn): return learn.selection.items()[['loss','seen','total']]

@pytest.fixture
def trained(tmp_path): return quiet_fit(from_folder(folder_of(tmp_path/'files'), valid=True), 2)

# A state that goes on elsewhere
def test_a_state_finds_its_items_in_another_split(trained, capsys):
    other = from_folder(trained.dls.path, seed=1, valid=True)
    other.selection.load_state_dict(trained.selection.state_dict())
    before,now = remembered(trained),remembered(other)
    there = now.index.intersection(before.index)
    assert 30<len(there)<len(now)==48
    pd.testing.assert_frame_equal(now.loc[there], before.loc[there])
    assert (now.drop(there).seen==0).all() and now.drop(there).loss.isna().all()
    told = capsys.readouterr().out
    assert f'{len(there)} of 48 training items go on with what was remembered' in told

    listed,list_before = other.selection.suspects(),trained.selection.suspects()
    train,train_before = (o[o.part=='train'] for o in (listed,list_before))
    assert {*train.index}=={*there}
    for name in ('label','likelier','margin','probability','looks'):
        pd.testing.assert_series_equal(train[name], train_before.loc[train.index,name])
    valid = listed[listed.part=='valid']
    both = {*list_before.index[list_before.part=='valid']} & {*map(key_of(other), other.dls.valid_ds.items)}
    assert {*valid.index}==both

def key_of(learn): return lambda path: Path(path).relative_to(learn.dls.path).as_posix()

def test_a_file_that_was_moved_or_replaced_takes_no_other_ones_memory(trained, tmp_path):
    state,before = trained.selection.state_dict(),remembered(trained)
    root = trained.dls.path.rename(tmp_path/'elsewhere') # of another disk
    moved = before.index[3]
    (root/moved).rename(root/'bee'/'new.txt')
    other = from_folder(root)
    other.selection.load_state_dict(state)
    now = remembered(other)
    there = now.index.intersection(before.index)
    pd.testing.assert_frame_equal(now.loc[there], before.loc[there])
    assert moved not in now.index and (now.loc[now.index.difference(there)].seen==0).all()

def test_a_state_of_the_same_items_is_as_it_was(trained, capsys):
    other = from_folder(trained.dls.path, valid=True)
    other.selection.load_state_dict(trained.selection.state_dict())
    assert capsys.readouterr().out==''
    pd.testing.assert_frame_equal(other.selection.suspects(), trained.selection.suspects())
    again = from_folder(trained.dls.path, valid=True)
    again.selection.load_state_dict(other.selection.state_dict()) # without a fit in between
    pd.testing.assert_frame_equal(again.selection.items(), trained.selection.items())

def table_of(n=40, index=None):
    kinds = [KINDS[i*i%7%3] for i in range(n)]
    return pd.DataFrame(dict(x=np.arange(n)/n, kind=kinds), index=index)

def from_table(df, vocab=None, block=None, get_y=ColReader('kind'), **kwargs):
    block = block or CategoryBlock(vocab=vocab)
    blocks = DataBlock((TransformBlock,block), get_x=lambda row: torch.tensor([float(row.x)]), get_y=get_y,
        splitter=IndexSplitter(range(len(df)-8, len(df))))
    return learner_of(blocks.dataloaders(df, bs=8, num_workers=0, drop_last=False), **kwargs)

def test_rows_are_found_by_their_own_index_and_a_corrected_one_begins_anew():
    df = table_of(index=[f'r{i}' for i in range(40)])
    learn = quiet_fit(from_table(df), 2)
    sorted_anew = pd.concat([df[:32].sample(frac=1, random_state=0), df[32:]])
    sorted_anew.loc['r5','kind'] = next(o for o in KINDS if o!=df.kind['r5'])
    other = from_table(sorted_anew)
    other.selection.load_state_dict(learn.selection.state_dict())
    now,before = remembered(other),remembered(learn)
    same = now.index.drop('r5')
    pd.testing.assert_frame_equal(now.loc[same], before.loc[same])
    assert now.seen['r5']==0

def test_a_table_whose_numbers_begin_anew_is_another_one():
    df = table_of()
    state = quiet_fit(from_table(df), 1).selection.state_dict()
    other = from_table(df.sample(frac=1, random_state=0).reset_index(drop=True))
    refused = pytest.raises(ValueError, match='got a state in which none of the 32 training items was found, wanted')
    with refused: other.selection.load_state_dict(state)
    assert other.selection.memory is None
    alien = from_table(df.set_axis([f'r{i}' for i in range(40)]))
    with refused: alien.selection.load_state_dict(state)

def test_rows_that_were_numbered_anew_take_no_other_ones_memory():
    "Row 20 is left out, and the others after it move up; many of their labels agree by chance"
    df = table_of()
    state = quiet_fit(from_table(df), 2).selection.state_dict()
    fewer = df.drop(index=20).reset_index(drop=True).assign(kind='ant')
    fewer['kind'] = [*df.kind[:20],*df.kind[20:39]] # as if none had moved
    other = from_table(fewer.assign(is_odd=True)) # truth values may change, as of a part to validate on
    other.selection.load_state_dict(state)
    seen = other.selection.items().seen
    assert (seen[:20]==2).all() and (seen[20:]==0).all()
    moved = from_table(df.drop(index=1).reset_index(drop=True))
    moved.selection.load_state_dict(state)
    assert moved.selection.items().seen.tolist()==[2]+[0]*30
    with pytest.raises(ValueError, match='none of the 31 training items was found'):
        from_table(fewer.assign(note='new')).selection.load_state_dict(state) # each row has another cell

def test_tensors_are_known_by_their_places_and_labels():
    def made(y, n=48):
        y = torch.tensor(y[:n])
        ds = TensorDataset(torch.zeros(n, 1), y)
        return learner_of(DataLoaders(DataLoader(ds, bs=8), DataLoader(ds, bs=8)))
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 48).tolist()
    state = quiet_fit(made(y), 1).selection.state_dict()
    for others in made(y, 40),made(rng.permutation(y).tolist()):
        with pytest.raises(ValueError, match='none of the 4. training items was found'):
            others.selection.load_state_dict(state)
    corrected = made([(label+(i%12==0))%3 for i,label in enumerate(y)])
    corrected.selection.load_state_dict(state)
    assert corrected.selection.memory.seen.tolist()==[int(i%12!=0) for i in range(48)]

def test_targets_that_are_drawn_anew_hold_no_state_up(capsys):
    df = table_of()
    noisy = dict(block=RegressionBlock(), get_y=lambda row: row.x+np.random.randn(), n_out=1, loss_func=MSELossFlat())
    state = quiet_fit(from_table(df, **noisy), 1).selection.state_dict()
    other = from_table(df, **noisy)
    other.selection.load_state_dict(state)
    assert other.selection.memory.seen.eq(1).all() and not capsys.readouterr().out

def test_classes_that_have_other_numbers_now_keep_their_names():
    df = table_of()
    learn = quiet_fit(from_table(df), 3)
    other = from_table(df, vocab=['ant','aye','bee','cat'], n_out=4)
    other.selection.load_state_dict(learn.selection.state_dict())
    pd.testing.assert_frame_equal(other.selection.suspects(), learn.selection.suspects())
    quiet_fit(other, 1)
    assert other.selection.suspects().looks.eq(4).all()

def test_an_early_loss_goes_with_its_item(tmp_path):
    root = folder_of(tmp_path)
    learn = from_folder(root)
    quiet_fit(learn.early_loss_sampling(after=1), 2)
    other = from_folder(root, seed=1).early_loss_sampling(after=1)
    other.selection.load_state_dict(learn.selection.state_dict())
    def early(learn):
        keys = map(key_of(learn), learn.dls.train_ds.items)
        return dict(zip(keys, learn.selection.early.loss.tolist()))
    before,now = early(learn),early(other)
    for key,loss in now.items(): assert loss==before[key] if key in before else np.isnan(loss)

def test_a_corrected_label_begins_anew_although_the_state_was_saved_before():
    df = table_of()
    learn = quiet_fit(from_table(df), 2)
    learn.selection.state_dict()
    df.loc[4,'kind'] = next(o for o in KINDS if o!=df.kind[4])
    learn.dls.train_ds.tls[1].items.loc[4,'kind'] = df.kind[4] # in memory, between two fits
    quiet_fit(learn, 1)
    other = from_table(df)
    other.selection.load_state_dict(learn.selection.state_dict())
    assert other.selection.items().seen[4]==1

def test_a_model_with_more_outputs_than_classes_goes_on_as_well():
    df = table_of()
    learn = quiet_fit(from_table(df, n_out=5), 2)
    other = from_table(df, vocab=['ant','aye','bee','cat'], n_out=5)
    other.selection.load_state_dict(learn.selection.state_dict())
    pd.testing.assert_frame_equal(other.selection.suspects(), learn.selection.suspects())
    assert quiet_fit(other, 1).selection.suspects().looks.eq(3).all()

# Copies
def test_rows_of_one_item_are_one_suspect_and_are_corrected_together():
    df = table_of(32)
    often = pd.concat([df, df.loc[[3,3,3,20]], table_of(40)[32:]])
    learn = quiet_fit(from_table(often), 2)
    found = learn.selection.suspects()
    assert len(found)==32 and found.index.is_unique
    assert found.looks[[3,20,5]].tolist()==[8,4,2]
    rows = [i for i,key in enumerate(learn.dls.train_ds.items.index) if key==3]
    told = learn.selection.labels
    assert found.margin[3]==pytest.approx(float(told.margins[rows].sum()/told.weights[rows].sum()), rel=1e-6)

    new = next(o for o in KINDS if o!=df.kind[3])
    frame = learn.selection.corrected(pd.DataFrame(dict(row=[3], label=[new])))
    assert len(frame)==len(often) and (frame.kind[frame.index==3]==new).all()
    assert (frame.kind[frame.index!=3].sort_index()==often.kind[often.index!=3].sort_index()).all()

def test_a_file_that_is_listed_twice_is_one_item(tmp_path):
    root = folder_of(tmp_path)
    files = sorted(root.rglob('*.txt'))
    block = DataBlock((TransformBlock,CategoryBlock), get_items=lambda path: [*files[:-6],*files[:5],*files[-6:]],
        get_x=size_of, get_y=parent_label, splitter=IndexSplitter(range(len(files)-1, len(files)+5)))
    learn = quiet_fit(learner_of(block.dataloaders(root, path=root, bs=8, num_workers=0, drop_last=False)), 1)
    found = learn.selection.suspects()
    assert Counter(found.looks)=={2: 5, 1: len(files)-11}

def test_rows_that_share_an_index_or_a_file_but_differ_are_items_of_their_own(tmp_path):
    root = folder_of(tmp_path, 4)
    df = pd.DataFrame(dict(file=['ant/0.txt']*4+['bee/1.txt']*4, box=range(8), kind=['ant','bee']*4))
    def keys(df):
        block = DataBlock((TransformBlock,CategoryBlock), get_x=ColReader('file', pref=root), get_y=ColReader('kind'),
            item_tfms=[], splitter=IndexSplitter([7]))
        return ItemKeys(block.datasets(df).train, root)
    assert keys(df).index.tolist()==list(range(7)) and len(keys(df).first)==7
    halves = keys(df.set_axis([0,0,1,1,2,2,3,3]))
    assert halves.index.name=='idx' and len(halves.first)==7 # neither tells rows apart

def test_an_item_of_a_subset_is_known_by_its_place_in_the_whole():
    y = torch.arange(60)%3
    whole = TensorDataset(y[:,None]*2.-2, torch.where(torch.arange(60)==31, 1-y%2, y))
    train,valid = Subset(whole, [*range(59, 9, -1)]),Subset(whole, range(10))
    dls = DataLoaders(DataLoader(train, bs=10, shuffle=True), DataLoader(valid, bs=10))
    learn = quiet_fit(learner_of(dls), 2)
    found = learn.selection.suspects()
    assert sorted(found.index)==list(range(10, 60))
    assert found.label.to_dict()=={i: int(whole[i][1]) for i in range(10, 60)}
    frame = learn.selection.corrected(pd.DataFrame(dict(idx=[31], label=[int(y[31])])))
    labels = [int(whole[i][1]) for i in [*train.indices,*valid.indices]]
    labels[train.indices.index(31)] = int(y[31])
    assert frame.label.tolist()==labels

# Both parts, and folds
def test_validation_is_listed_as_it_was_predicted(trained):
    "Twice, after each epoch; held against the model of the last one"
    found,plain = trained.selection.suspects(),from_folder(trained.dls.path)
    assert found.part.value_counts().to_dict()==dict(train=48, valid=12)
    looks = []
    class Notes(Callback):
        def after_validate(self):
            xb,yb = (torch.cat(o) for o in zip(*self.dls.valid))
            with torch.no_grad(): looks.append(self.model(xb).softmax(1).gather(1, yb[:,None])[:,0])

    quiet_fit(plain, 2, cbs=Notes())
    assert all(torch.equal(*o) for o in zip(plain.model.parameters(), trained.model.parameters()))
    valid = [key_of(trained)(o) for o in trained.dls.valid_ds.items]
    assert found.probability[valid].tolist()==pytest.approx(torch.stack(looks).mean(0).tolist(), rel=1e-4)
    assert (found.looks==2).all()

def test_parts_are_put_together_by_rank(trained):
    "What trains is predicted more surely: by margin the validation part would come first after a long training"
    found = trained.selection.suspects()
    for part,n in dict(train=48, valid=12).items():
        own = found[found.part==part]
        assert own.margin.is_monotonic_increasing
        for share in (.25,.5,.75): assert abs((found.part[:int(60*share)]==part).sum()-n*share)<=1

def test_validation_alone_prediction_and_the_search_for_a_rate_are_no_looks(trained):
    before = trained.selection.suspects()
    with trained.no_bar(),trained.no_logging():
        trained.validate()
        trained.get_preds()
        trained.lr_find(show_plot=False, num_it=6)
    pd.testing.assert_frame_equal(trained.selection.suspects(), before)

@pytest.mark.parametrize('bs', [4,12])
def test_a_validation_that_was_interrupted_spoils_no_later_look(tmp_path, bs):
    learn = from_folder(folder_of(tmp_path), valid=True)
    learn.dls.valid.bs = bs
    class Stops(Callback):
        def after_batch(self):
            if not self.training: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): quiet_fit(learn, 1, cbs=Stops())
    quiet_fit(learn, 2)
    looks = learn.selection.validation.labels.looks.tolist()
    assert sorted(looks)==[2]*(12-bs)+[3]*bs
    memory,plain = learn.selection.validation.memory,learn.get_preds(reorder=False)
    losses = torch.nn.functional.cross_entropy(plain[0].log(), plain[1], reduction='none')
    assert memory.loss.tolist()==pytest.approx(losses.tolist(), rel=1e-3, abs=1e-4)

def test_another_validation_part_has_no_looks_of_this_one(trained, tmp_path):
    other = from_folder(trained.dls.path, seed=3)
    trained.dls = type(trained.dls)(trained.dls.train, other.dls.valid)
    with pytest.raises(ValueError, match='suspects: got another valid part than the one that was watched'):
        trained.selection.suspects()
    quiet_fit(trained, 1)
    found = trained.selection.suspects()
    assert (found.looks[found.part=='valid']==1).all() and (found.looks[found.part=='train']==3).all()

def test_a_validation_label_that_changes_begins_anew():
    df = table_of()
    learn = quiet_fit(from_table(df, valid=True), 2)
    learn.dls.valid_ds.tls[1].items.loc[35,'kind'] = next(o for o in KINDS if o!=df.kind[35])
    found = quiet_fit(learn, 1).selection.suspects()
    assert found.looks[35]==1 and found.looks.drop(35).eq(3).all()

def test_without_validation_items_there_is_nothing_to_watch_in_them(tmp_path):
    ds = TensorDataset(torch.zeros(8, 1), torch.zeros(8, dtype=torch.int64))
    learn = learner_of(DataLoaders(DataLoader(ds, bs=4)), valid=True)
    with pytest.raises(ValueError, match='watch_items: got valid=True, and no validation items'): quiet_fit(learn, 1)

def test_folds_are_one_list(tmp_path):
    root = folder_of(tmp_path)
    learners = [quiet_fit(from_folder(root, seed, valid=True), 2) for seed in range(3)]
    found = suspects_of_folds(learners)
    assert len(found)==60 and (found.looks==6).all() and found.margin.is_monotonic_increasing
    lists = [learn.selection.suspects() for learn in learners]
    for key in found.index[:20]:
        assert found.label[key]==lists[0].label[key]
        assert found.probability[key]==pytest.approx(np.mean([o.probability[key] for o in lists]), rel=1e-4, abs=1e-6)
        margins = [o.margin[key] for o in lists] # of looks that do not weigh the same
        assert min(margins)-1e-6<=found.margin[key]<=max(margins)+1e-6
        assert found.disagreed[key]==sum(o.disagreed[key] for o in lists)
    frame = learners[1].selection.corrected(found.head(2).assign(label='ant'))
    assert frame.set_index('file').label[found.index[:2]].tolist()==['ant','ant']

def test_folds_may_know_other_classes_each():
    "Of 40 rows the rare class is in the first half only"
    def fold(kinds, bias):
        df = pd.DataFrame(dict(x=np.zeros(40), kind=kinds))
        learn = from_table(df, n_out=len({*kinds}))
        with torch.no_grad():
            learn.model.weight[:] = 0.
            learn.model.bias[:] = torch.tensor(bias)
        return quiet_fit(learn, 1, lr=0.)
    kinds = ['ant']*2+['bee']*19+['cat']*19
    one = fold(kinds, [0.,0.,5.])
    two = fold(kinds[2:]+['bee']*2, [0.,5.]) # of other rows
    two.dls.train_ds.tls[-1].items.index += 100
    for learners in ([one,two],[two,one]):
        found = suspects_of_folds(learners)
        assert {*found.likelier[found.label=='bee']}=={'cat'} and found.likelier[found.label=='cat'].isna().all()

def test_folds_of_tables_that_were_numbered_anew_are_refused():
    df = table_of()
    learners = [quiet_fit(from_table(o), 1) for o in (df,df.assign(x=1-df.x))]
    with pytest.raises(ValueError, match='got items of the same key whose rows or labels differ'):
        suspects_of_folds(learners)

def test_files_of_two_folders_are_two_files(tmp_path):
    learners = [quiet_fit(from_folder(folder_of(tmp_path/name, 8)), 1) for name in 'ab']
    assert len(suspects_of_folds(learners))==sum(len(o.dls.train_ds) for o in learners)

def test_a_target_transform_of_torchvision_is_a_label(tmp_path):
    from selback.callback.items import labels_of
    class Images(torch.utils.data.Dataset):
        targets,samples = [0,1,2,3],[(f'{i}.png', i) for i in range(4)]
        def target_transform(self, y): return y%2
        def __len__(self): return 4
        def __getitem__(self, i): return torch.zeros(1),self.target_transform(self.targets[i])
    assert labels_of(Images())==[0,1,0,1]

def test_folds_by_places_in_different_datasets_are_refused():
    def made():
        ds = TensorDataset(torch.zeros(8, 1), torch.zeros(8, dtype=torch.int64))
        return quiet_fit(learner_of(DataLoaders(DataLoader(ds, bs=4), DataLoader(ds, bs=4))), 1)
    with pytest.raises(ValueError, match='items that are known by their positions in other datasets'):
        suspects_of_folds([made(),made()])

def told(others, n_labels=1):
    others = torch.tensor(others)
    ones = torch.ones(len(others))
    return Told(ones, ones*.5, ones*.25, others, torch.ones(3), torch.zeros(len(others), 3), torch.zeros_like(others))

def test_memories_of_the_same_items_add_up():
    a,b = LabelMemory(3),LabelMemory(4)
    for others in ([1,2,-1],[1,-1,-1]): a.note(torch.arange(3), told(others))
    b.note(torch.arange(4), told([2,2,2,1]))
    joined = LabelMemory(3)
    joined.add(a, torch.arange(3))
    joined.add(b, torch.tensor([0,1,1,2])) # items 1 and 2 of `b` are the same
    assert joined.looks.tolist()==[3,4,3] and joined.disagreed.tolist()==[3,3,1]
    assert joined.logit_margins.tolist()==[3.,4.,3.] and joined.probabilities.tolist()==[.75,1.,.75]
    for memory in (a,b): memory.end_epoch()
    weights = [float(memory.weights[0]/memory.looks[0]) for memory in (a,b)]
    shares = torch.tensor([[2.,1.],[2.,2.],[2.,1.]])*torch.tensor(weights)
    margins = shares@torch.tensor([float(memory.margin[0]) for memory in (a,b)])
    torch.testing.assert_close(joined.margin, margins/shares.sum(1))
    assert joined.most_other.tolist()==[1,2,1] and joined.votes.tolist()==[1,3,1]
    assert joined.is_estimated_error.tolist()==[True,True,False]
