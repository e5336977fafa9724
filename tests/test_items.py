"Which item is it? Its key in lists, in states that go on elsewhere, and where it stands more than once"
from pathlib import Path

import numpy as np, pandas as pd, pytest
from fastai.data.block import CategoryBlock, DataBlock, TransformBlock
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.data.transforms import ColReader, IndexSplitter, RandomSplitter, parent_label
from helpers import *
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
    learn = learner_on(dls, nn.Linear(1, n_out), loss_func=loss_func, lr=.01)
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

def test_another_validation_part_has_no_looks_of_this_one(trained, tmp_path):
    other = from_folder(trained.dls.path, seed=3)
    trained.dls = type(trained.dls)(trained.dls.train, other.dls.valid)
    with pytest.raises(ValueError, match='suspects: got another valid part than the one that was watched'):
        trained.selection.suspects()
    quiet_fit(trained, 1)
    found = trained.selection.suspects()
    assert (found.looks[found.part=='valid']==1).all() and (found.looks[found.part=='train']==3).all()

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
