"What a person corrects reaches the items that it is about, and nothing else, whatever they and their labels are called"
import tempfile
from pathlib import Path

import numpy as np, pandas as pd, pytest
from fastai.data.block import CategoryBlock, DataBlock, MultiCategoryBlock, TransformBlock
from fastai.data.transforms import ColReader, ColSplitter, IndexSplitter, RandomSplitter, parent_label
from fastai.losses import BCEWithLogitsLossFlat
from helpers import *
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st

thorough = settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def fresh(folder): return Path(tempfile.mkdtemp(dir=folder)) # for an example
letters = st.characters(whitelist_categories=('L','N','P','S','Zs'), blacklist_characters='/\\\0')
names = st.text(letters, min_size=1, max_size=8).filter(lambda o: o.strip('. ') and o.encode('utf-8'))
ENCODINGS = 'utf-8','utf-8-sig'

def watched(dls, n_out):
    "A learner that has looked once at each item"
    learn = learner_on(dls, nn.Linear(1, n_out), lr=.01).watch_items(valid=True)
    return quiet_fit(learn, 1)

def others_than(label, classes): return [o for o in classes if str(o)!=str(label)]

def by_hand(draw, found, classes):
    "What a person makes of a list: some labels are others, some rows are left out"
    rows = draw(st.lists(st.integers(0, len(found)-1), min_size=1, max_size=4, unique=True))
    table,said = found[['label']].astype(object),{}
    for row in rows:
        new = draw(st.sampled_from([*others_than(table.label.iloc[row], classes),None]))
        table.iloc[row,0] = 'unsure' if new is None else new
        said[found.index[row]] = new
    if 'part' in found: table['part'] = found.part
    return table,said

def handed_in(draw, table, folder):
    "As it is, or as a file of some encoding with some separator"
    encoding = draw(st.sampled_from([None,*ENCODINGS]))
    if encoding is None: return table
    file = folder/'table.csv'
    table.to_csv(file, sep=draw(st.sampled_from(',;\t')), encoding=encoding)
    return file

# Folders
def size_of(path): return torch.tensor([float(Path(path).stat().st_size)])

def from_files(root, files=None, seed=0):
    def listed(path): return sorted(o for o in Path(path).rglob('*') if o.is_file())
    block = DataBlock((TransformBlock,CategoryBlock), get_items=listed if files is None else lambda path: files,
        get_x=size_of, get_y=parent_label, splitter=RandomSplitter(.3, seed=seed))
    return block.dataloaders(root, path=root, bs=4, num_workers=0, drop_last=False)

def from_table(table, root):
    block = DataBlock((TransformBlock,CategoryBlock), get_x=lambda row: size_of(root/row['file']),
        get_y=ColReader('label'), splitter=ColSplitter())
    return block.dataloaders(table, path=root, bs=4, num_workers=0, drop_last=False)

@thorough
@given(st.data())
def test_files_of_any_name_get_the_labels_that_a_person_chose(tmp_path, data):
    tmp_path = fresh(tmp_path)
    classes = data.draw(st.lists(names, min_size=2, max_size=3, unique=True))
    called = data.draw(st.lists(names, min_size=3, max_size=5, unique=True))
    for i,(label,name) in enumerate((label, name) for label in classes for name in called): # in several folders
        file = tmp_path/'root'/label/name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b'x'*i)
    root = tmp_path/'root'
    labels = {f'{label}/{name}': label for label in classes for name in called}

    dls = from_files(root)
    for _ in range(2): # rounds
        learn = watched(dls, len(classes))
        found = learn.selection.suspects()
        files = found.index if found.index.name=='file' else found.file # a table has an index of its own
        assert dict(zip(files, found.label))==labels
        parts = dict(zip(files, found.part))
        table,said = by_hand(data.draw, found, classes)
        said = {files[key] if found.index.name!='file' else key: label for key,label in said.items()}
        frame = learn.selection.corrected(handed_in(data.draw, table, tmp_path))
        labels = {key: label for key,label in (labels | said).items() if label is not None}
        assert frame.set_index('file').label.to_dict()==labels
        assert dict(zip(frame.file, frame.is_valid))=={key: parts[key]=='valid' for key in labels}
        assume({*frame.label[~frame.is_valid]}>={*frame.label} and frame.is_valid.any() and (~frame.is_valid).sum()>1)
        dls = from_table(frame, root)
        classes = sorted({*frame.label})
        assume(len(classes)>1)

# Tables
LABELS = dict(text=['a','NA','no'], digits=['0','10','12'], whole=[0,10,12], real=[3.,5.,7.5], truth=[True,False],
    empty=['','None','b'])
INDICES = dict(counted=lambda n: pd.RangeIndex(n), own=lambda n: pd.Index(np.arange(n)[::-1]*3+7, name='id'),
    text=lambda n: pd.Index([f'{i:03}' for i in range(n)]), repeated=lambda n: pd.Index(np.arange(n)//2),
    pair=lambda n: pd.MultiIndex.from_arrays([np.arange(n)//3,list('abc'*n)[:n]], names=['plant',None]))
OWN = 'likelier','margin','looks','idx','row','file','item','part','label','key','is_valid','Größe; in cm'

def table_block(column, splitter):
    return DataBlock((TransformBlock,CategoryBlock), get_x=lambda row: torch.tensor([float(row['x'])]),
        get_y=ColReader(column), splitter=splitter)

@thorough
@given(st.data())
def test_tables_of_any_kind_differ_in_the_chosen_labels_only(tmp_path, data):
    draw,n,tmp_path = data.draw,15,fresh(tmp_path)
    kind,index = draw(st.sampled_from([*LABELS])),draw(st.sampled_from([*INDICES]))
    column = draw(st.sampled_from(['label','kind','likelier']))
    values = LABELS[kind]
    given = [*values,*draw(st.lists(st.sampled_from(values), min_size=n-len(values), max_size=n-len(values)))]
    df = pd.DataFrame({'x': np.arange(n)/n, column: given}, index=INDICES[index](n))
    if draw(st.booleans()) and kind in ('text','whole'): df[column] = df[column].astype('category')
    for name in draw(st.lists(st.sampled_from([o for o in OWN if o!=column]), max_size=4, unique=True)):
        df[name] = draw(st.sampled_from([np.arange(n),[f'{i}, {name}' for i in range(n)],np.arange(n)/3]))
    valid = list(range(n-4, n))
    splitter = draw(st.sampled_from([IndexSplitter(valid),RandomSplitter(.3, seed=1)]))

    learn = watched(table_block(column, splitter).dataloaders(df, bs=4, num_workers=0, drop_last=False), len(values))
    found = learn.selection.suspects()
    assert len(found)==n
    table,said = by_hand(draw, found if index!='repeated' else found[found.part=='train'], [str(o) for o in values])
    train,valid = (learn.dls.loaders[i].dataset.items for i in (0,1))
    handed = handed_in(draw, table, tmp_path)
    if index=='repeated':
        frame = learn.selection.corrected(handed)
        at = {i: train.x.iloc[i] for i in said} # known by their places in the training part
        with pytest.raises(ValueError, match='no table with .* whose index'): learn.selection.corrected(handed, df)
    else:
        frame = learn.selection.corrected(handed, table=df)
        at = {key: df.x[key] for key in said}
        own = learn.selection.corrected(handed)
        pd.testing.assert_frame_equal(own[df.columns].sort_values('x'), frame.sort_values('x'))
        if index=='counted': assert own.x.tolist()==frame.x.tolist()
    wanted = df.copy().set_index('x', drop=False).rename_axis(None)
    new = {at[key]: label for key,label in said.items()}
    types = {str(o): o for o in values}
    label = wanted[column].astype(object).to_dict() | {x: types.get(o) for x,o in new.items()}
    wanted[column] = pd.Series(label).astype(df[column].dtype) if None not in label.values() else pd.Series(label)
    wanted = wanted[[o is not None for o in label.values()]]
    wanted[column] = wanted[column].astype(df[column].dtype)
    got = frame[df.columns].sort_values('x').set_index('x', drop=False).rename_axis(None)
    pd.testing.assert_frame_equal(got, wanted)
    if index!='repeated': assert frame.index.tolist()==[key for key in df.index if said.get(key, '') is not None]

# What comes from elsewhere
KINDS = 'ant','bee','cat'

def folder_of(path, n=8):
    for i in range(3*n):
        file = path/KINDS[i%3]/f'{i}.txt'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b'x'*i)
    return path

@pytest.fixture
def learn(tmp_path): return watched(from_files(folder_of(tmp_path/'files')), 3)

def labels_by_file(frame): return frame.set_index('file').label.to_dict()

def said(**labels): return {name.replace('_', '/')+'.txt': label for name,label in labels.items()}

CSV = {name: 'file{0}label{0}note\nant/0.txt{0}cat{0}"x{0} y"\nbee/1.txt{0}bee{0}\n{0}{0}\n{0}{0}\n'.format(sep)
    for name,sep in dict(comma=',', semicolon=';', tab='\t').items()}

@pytest.mark.parametrize('ends', ['\n','\r\n'])
@pytest.mark.parametrize('name', CSV)
def test_a_spreadsheet_saves_as_it_likes(learn, tmp_path, name, ends):
    "With rows at the end that are blank, and a note in quotes"
    (tmp_path/'t.csv').write_bytes(CSV[name].replace('\n', ends).encode())
    before = labels_by_file(learn.selection.corrected({}))
    assert labels_by_file(learn.selection.corrected(tmp_path/'t.csv'))==before | {'ant/0.txt': 'cat'}

@pytest.mark.parametrize('encoding', ['cp1252','utf-8-sig'])
def test_a_spreadsheet_saves_umlauts_in_its_own_way(tmp_path, encoding):
    root = tmp_path/'files'
    for i in range(12):
        file = root/('Käfer','Größe')[i%2]/f'ä {i}.txt'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b'x'*i)
    learn = watched(from_files(root), 2)
    (tmp_path/'t.csv').write_text('file;label\nKäfer/ä 0.txt;Größe \n', encoding=encoding)
    after = labels_by_file(learn.selection.corrected(tmp_path/'t.csv'))
    assert after['Käfer/ä 0.txt']=='Größe' and after['Käfer/ä 2.txt']=='Käfer'

def test_a_frame_a_file_and_a_dictionary_say_the_same(learn, tmp_path):
    new = {'ant/0.txt': 'cat', 'bee/1.txt': 'unsure'}
    frame = learn.selection.suspects()[['label','margin']].astype(object)
    for file,label in new.items(): frame.loc[file,'label'] = label
    frame.to_csv(tmp_path/'t.csv')
    by_dict = learn.selection.corrected(new)
    for found in (frame,frame.reset_index(),tmp_path/'t.csv',str(tmp_path/'t.csv'),frame.label,pd.Series(new)):
        pd.testing.assert_frame_equal(learn.selection.corrected(found), by_dict)
    assert len(by_dict)==23 and labels_by_file(by_dict)['ant/0.txt']=='cat'

REFUSED = [({'0.txt': 'bee'}, "1 keys that no item has, such as '0.txt', wanted file such as '.*/.*txt'"),
    (['ant/0.txt'], 'got a list, wanted the list'),
    (pd.DataFrame(dict(image=['ant/0.txt'], choice=['bee'])), "columns .'image', 'choice'., wanted 'file' and 'label'"),
    ({'ant/0.txt': 'wasp'}, "a label 'wasp', wanted one of ant, bee, cat; new_classes=True"),
    (pd.DataFrame(dict(file=['ant/0.txt']*2, label=['bee','cat'])), "disagree on the item ant.0.txt, .* one is 'cat'")]

@pytest.mark.parametrize('found,match', REFUSED)
def test_what_is_not_understood_is_refused(learn, found, match):
    with pytest.raises((ValueError,TypeError), match=match): learn.selection.corrected(found)

def test_what_is_no_text_is_named(learn, tmp_path):
    learn.selection.suspects().to_csv(tmp_path/'t.csv', encoding='utf-16')
    with pytest.raises(ValueError, match='which is UTF-16 or no text, wanted a CSV file; save it as UTF-8'):
        learn.selection.corrected(tmp_path/'t.csv')

@pytest.mark.parametrize('found', [{'7': '02'}, {'007': '1'}, {'007': 1}])
@pytest.mark.parametrize('new_classes', [False, True])
def test_zeros_that_were_lost_are_told_of(found, new_classes):
    "As by pandas, where it is left to take digits for numbers"
    df = pd.DataFrame(dict(x=np.arange(12)/12, kind=['01','02','10']*4), index=[f'{i:03}' for i in range(12)])
    learn = watched(table_block('kind', IndexSplitter(range(9, 12))).dataloaders(df, bs=4, drop_last=False), 3)
    with pytest.raises(ValueError, match="got '7', wanted '007'|got '1', wanted '01'; .* with dtype=str"):
        learn.selection.corrected(found, new_classes=new_classes)

SPELT = [([5.,3.,7.],'5'), ([5,3,7],'5.0'), ([5,3,7],' 5 '), (['a','b','c'],'a ')]

@pytest.mark.parametrize('values,said', SPELT)
def test_a_label_is_known_however_it_is_written(values, said):
    df = pd.DataFrame(dict(x=np.arange(12)/12, kind=[values[i%3] for i in range(12)]))
    learn = watched(table_block('kind', IndexSplitter(range(9, 12))).dataloaders(df, bs=4, drop_last=False), 3)
    frame = learn.selection.corrected(pd.DataFrame(dict(row=[1], label=[said])))
    assert frame.kind.tolist()==[values[0] if i==1 else o for i,o in enumerate(df.kind)]
    assert frame.kind.dtype==df.kind.dtype

@pytest.mark.parametrize('values', [['NA','None','nan'], [5,3,7], [.5,1.,2.]], ids=['missing','whole','real'])
def test_labels_come_back_from_a_file_and_other_columns_are_as_they_were(values, tmp_path):
    "Gaps and digits with zeros in front, beside a column called `label` that did not train"
    df = pd.DataFrame(dict(x=np.arange(12)/12, kind=[values[i%3] for i in range(12)], label=[values[0]]*12,
        code=[f'{i:04}' for i in range(12)], note=[None,'seen','NA']*4, size=[np.nan,1.,2.]*4))
    learn = watched(table_block('kind', IndexSplitter([10,11])).dataloaders(df, bs=4, drop_last=False), 3)
    learn.selection.suspects().head(9).assign(label=values[1]).to_csv(tmp_path/'t.csv')
    changed = learn.selection.suspects().index[:9]
    frame = learn.selection.corrected(tmp_path/'t.csv')
    kind = df.kind.where(~df.index.isin(changed), values[1])
    pd.testing.assert_frame_equal(frame[[*df]], df.assign(kind=kind))
    assert frame.is_valid.tolist()==[False]*10+[True]*2

def test_an_item_that_is_in_the_other_part_now_is_corrected_there(learn):
    found = learn.selection.suspects()
    other = watched(from_files(learn.dls.path, seed=1), 3)
    now = other.selection.suspects().part
    assert (now[found.index]!=found.part).any()
    assert {*other.selection.corrected(found.assign(label='bee')).label}=={'bee'}

def test_a_label_of_the_vocabulary_that_no_training_item_has_is_known():
    df = pd.DataFrame(dict(x=np.arange(12)/12, kind=['a','b']*6))
    blocks = TransformBlock,CategoryBlock(vocab=['a','b','z'])
    block = DataBlock(blocks, get_x=lambda row: torch.tensor([float(row.x)]), get_y=ColReader('kind'),
        splitter=IndexSplitter([11]))
    learn = watched(block.dataloaders(df, bs=4, drop_last=False), 3)
    table = pd.DataFrame(dict(row=[1], label=['z']))
    assert learn.selection.corrected(table).kind[1]=='z'
    new = table.assign(label='quite new')
    with pytest.raises(ValueError, match="got a label 'quite new', wanted one of a, b, z; new_classes=True takes it"):
        learn.selection.corrected(new)
    assert learn.selection.corrected(new, new_classes=True).kind[1]=='quite new'

def a_table(index=None):
    df = pd.DataFrame(dict(x=np.arange(15)/15, kind=['a','b','c']*5, sure=[True,False,None]*5), index)
    return df,watched(table_block('kind', IndexSplitter(range(9, 15))).dataloaders(df, bs=4, drop_last=False), 3)

@pytest.mark.parametrize('index', ['counted','own','text','pair'])
def test_what_is_corrected_and_undone_is_as_before(index):
    df,learn = a_table(INDICES[index](15))
    new = {df.index[2]: 'a', df.index[11]: 'b'}
    frame = learn.selection.corrected(new, df)
    pd.testing.assert_frame_equal(frame, df.assign(kind=[new.get(key, o) for key,o in df.kind.items()]))
    again = watched(table_block('kind', IndexSplitter(range(9, 15))).dataloaders(frame, bs=4, drop_last=False), 3)
    pd.testing.assert_frame_equal(again.selection.corrected({key: df.kind[key] for key in new}, frame), df)
    whole = again.selection.corrected({key: df.kind[key] for key in new})
    pd.testing.assert_frame_equal(whole[[*df]].sort_values('x'), df)

@pytest.mark.parametrize('name', ['label','part','margin'])
def test_an_index_may_be_called_like_a_column_of_the_list(name, tmp_path):
    df,learn = a_table(pd.Index([f'r{i}' for i in range(15)], name=name))
    found = learn.selection.suspects()
    found.head(2).assign(label=found.likelier).to_csv(tmp_path/'suspects.csv')
    frame = learn.selection.corrected(tmp_path/'suspects.csv', df)
    assert frame.kind[found.index[:2]].tolist()==found.likelier[:2].tolist()
    assert (frame.kind!=df.kind).sum()==2

def test_a_users_table_may_have_more_rows_and_another_order():
    df,learn = a_table()
    more = pd.concat([df, df.set_axis(range(100, 115))]).sample(frac=1, random_state=0)
    frame = learn.selection.corrected({3: 'b', 4: 'unsure'}, more)
    pd.testing.assert_frame_equal(frame, more.assign(kind=more.kind.where(more.index!=3, 'b')).drop(4))

def test_another_table_than_the_one_that_trained_is_refused():
    df,learn = a_table()
    for other in (df[2:],df.set_axis([0]*15),df.drop(columns='kind')):
        with pytest.raises(ValueError, match="no table with .'kind'. whose index tells"):
            learn.selection.corrected({3: 'b'}, other)
    with pytest.raises(ValueError, match="got kind 'c' in row 0, wanted 'a', which trained"):
        learn.selection.corrected({3: 'b'}, df.assign(kind=df.kind[::-1].to_numpy()))

def test_truth_values_and_gaps_of_a_spreadsheet_are_no_other_items(tmp_path):
    df,learn = a_table()
    (tmp_path/'t.csv').write_text('row,label,x,sure\n3.0,b,0.20000000001,TRUE\n4,,0.2666667,\n')
    wanted = df.assign(kind=df.kind.where(df.index!=3, 'b'))
    pd.testing.assert_frame_equal(learn.selection.corrected(tmp_path/'t.csv', df), wanted)
    (tmp_path/'t.csv').write_text('row;label;x;sure\n3;b;0,2;TRUE\n4;;0,2666667;\n')
    pd.testing.assert_frame_equal(learn.selection.corrected(tmp_path/'t.csv', df), wanted)
    (tmp_path/'t.csv').write_text('row;label;x;sure\n3;b;0,3;TRUE\n')
    with pytest.raises(ValueError, match="got x '0,3' in row 0, wanted 0.2"):
        learn.selection.corrected(tmp_path/'t.csv')
    (tmp_path/'t.csv').write_text('row,label,x,sure\n3,b,0.2,FALSE\n')
    with pytest.raises(ValueError, match="got sure 'FALSE' in row 0, wanted True"):
        learn.selection.corrected(tmp_path/'t.csv')

def images_of(tmp_path):
    "A table of files, numbered from 0, in another order than its files"
    root = folder_of(tmp_path/'files')
    files = sorted((o.relative_to(root).as_posix() for o in root.rglob('*.txt')), key=lambda o: hash_of(o))
    df = pd.DataFrame(dict(file=files, label=[o.split('/')[0] for o in files], is_valid=[i%4==0 for i in range(24)]))
    return df,root,watched(by_column(df, root), 3)

def by_column(df, root):
    block = DataBlock((TransformBlock(type_tfms=[size_of]),CategoryBlock), get_x=ColReader('file', pref=f'{root}/'),
        get_y=ColReader('label'), splitter=ColSplitter())
    return block.dataloaders(df, path=root, bs=4, num_workers=0, drop_last=False)

def hash_of(text): return sum((i+3)*ord(c) for i,c in enumerate(text))%101

@pytest.mark.parametrize('index', [None,[0,1,3]])
def test_a_list_of_files_goes_by_its_files_where_these_are_the_key(tmp_path, index):
    df,root,learn = images_of(tmp_path)
    asked = [df.file[i] for i in (7,9,20)]
    table = pd.DataFrame(dict(file=asked, label=['ant','bee','cat']), index=index)
    table.to_csv(tmp_path/'t.csv', index=False)
    for handed in (table,tmp_path/'t.csv',dict(zip(asked, table.label))):
        frame = learn.selection.corrected(handed, key='file')
        assert dict(zip(frame.file, frame.label))==dict(zip(df.file, df.label)) | dict(zip(asked, table.label))

def test_a_column_that_several_items_share_names_them_all():
    df = pd.DataFrame(dict(x=np.arange(12)/12, kind=['a','b']*6, ward=[1,2,3]*4))
    learn = watched(table_block('kind', IndexSplitter([10,11])).dataloaders(df, bs=4, drop_last=False), 2)
    frame = learn.selection.corrected({2: 'a'}, key='ward')
    assert frame.kind.tolist()==df.kind.where(df.ward!=2, 'a').tolist()

def test_items_without_a_name_are_told_by_part_and_place():
    y = torch.arange(16)%2
    dls = dls_of(torch.zeros(16, 1), y, n_valid=6, bs=5)
    learn = watched(dls, 2)
    frame = learn.selection.corrected(pd.DataFrame(dict(idx=[1,2], label=[0,1], part=['valid','train'])))
    given = [*y[6:].tolist(),*y[:6].tolist()]
    given[2],given[10+1] = 1,0
    assert frame.label.tolist()==given and frame.idx.tolist()==[*range(10),*range(6)]
    pd.testing.assert_frame_equal(learn.selection.corrected({(1,'valid'): 0, (2,'train'): 1}), frame)
    assert learn.selection.corrected({2: 1}).label.tolist()==given[:11]+[y[1].item()]+given[12:]
    with pytest.raises(ValueError, match="keys that no item has, such as '1, test'"):
        learn.selection.corrected({(1,'test'): 0})

def sizes():
    from fastai.data.block import RegressionBlock
    df = pd.DataFrame(dict(x=np.arange(12)/12, size=np.arange(12)/4))
    block = DataBlock((TransformBlock,RegressionBlock), get_x=lambda row: torch.tensor([float(row.x)]),
        get_y=ColReader('size'), splitter=IndexSplitter([11]))
    learn = Learner(block.dataloaders(df, bs=4, drop_last=False), nn.Linear(1, 1), loss_func=MSELossFlat())
    return df,quiet_fit(learn.watch_items(), 1).selection

@pytest.mark.parametrize('label', ['dog','3,5','nan','inf'])
def test_what_is_no_number_is_refused_where_labels_are_numbers(label):
    with pytest.raises(ValueError, match=f"got a label '{label}', wanted a number such as"):
        sizes()[1].corrected({1: label})

def test_a_number_is_a_label_where_labels_are_numbers():
    df,selection = sizes()
    frame = selection.corrected(pd.DataFrame(dict(row=[1,2,3], label=['17.25','unsure',None])))
    assert frame['size'].tolist()==[0,17.25,*df['size'][3:]]

def test_a_list_of_a_table_that_was_numbered_anew_is_refused(tmp_path):
    df,root,learn = images_of(tmp_path)
    found = learn.selection.suspects().drop(index=23).head(9)
    again = watched(by_column(df[1:].reset_index(drop=True), root), 3)
    with pytest.raises(ValueError, match="got file .* in row .*, wanted .*; if the table was numbered anew"):
        again.selection.corrected(found)
    right = again.selection.corrected(found.assign(label='cat')[1:], key='file')
    assert (right.set_index('file').label[[*found.file[1:]]]=='cat').all()

def test_what_nobody_has_got_to_says_nothing(learn, capsys):
    table = pd.DataFrame(dict(file=['ant/0.txt','ant/0.txt','bee/1.txt','cat/2.txt'], label=['cat','cat','',None]))
    after = labels_by_file(learn.selection.corrected(table))
    assert len(after)==24 and after['ant/0.txt']=='cat' and after['bee/1.txt']=='bee'
    assert 'of 2 rows 1 give an item another label, 0 leave one out.' in capsys.readouterr().out

def test_a_split_that_a_column_tells_stays_in_that_column():
    df = pd.DataFrame(dict(x=np.arange(12)/12, kind=['a','b','c']*4, is_valid=[i%4==0 for i in range(12)]))
    dls = table_block('kind', ColSplitter()).dataloaders(df, bs=4, drop_last=False)
    turned = type(dls)(dls.valid.new(shuffle=True), dls.train) # trained on what was for validation
    frame = watched(turned, 3).selection.corrected(pd.DataFrame(dict(row=[0], label=['b'])))
    pd.testing.assert_frame_equal(frame, df.assign(kind=['b',*df.kind[1:]]))

# A table that is processed
def ages(n=40):
    i = np.arange(n)
    return pd.DataFrame(dict(age=i.astype(float), kind=np.where(i%3==0, 'a', 'b'), good=np.where(i%2==0, 'yes', 'no')),
        index=[f'p{k}' for k in i])

def test_a_processed_table_is_corrected_in_the_users_own(tmp_path):
    from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, tabular_learner
    df = ages()
    columns = dict(cat_names=['kind'], cont_names=['age'], y_names='good', procs=[Categorify,Normalize])
    dls = TabularDataLoaders.from_df(df, valid_idx=[*range(30, 40)], bs=10, **columns)
    learn = quiet_fit(tabular_learner(dls, layers=[4]).watch_items(valid=True), 1)
    found = learn.selection.suspects()
    assert found.index[found.part=='valid'].sort_values().tolist()==[f'p{i}' for i in range(30, 40)]
    assert {*found.index}<={*df.index} # the loader draws some rows often, and others not at all
    with pytest.raises(ValueError, match='pass it: corrected.found, df.'): learn.selection.corrected(found)
    table = found.head(2).assign(label=['no','yes'])
    right = df.assign(good=[table.label.get(key, label) for key,label in df.good.items()])
    pd.testing.assert_frame_equal(learn.selection.corrected(table, df), right)
    df.sample(frac=1, random_state=0).to_csv(tmp_path/'numbered.csv', index=False)
    with pytest.raises(ValueError, match='corrected: got'): # and not other rows' labels
        learn.selection.corrected(tmp_path/'numbered.csv', df)
    split = TabularDataLoaders.from_df(df, valid_idx=[*range(10)], bs=10, **columns) # normed by others' mean
    other = tabular_learner(split, layers=[4]).watch_items()
    table.to_csv(tmp_path/'list.csv')
    pd.testing.assert_frame_equal(other.selection.corrected(tmp_path/'list.csv', df), right)
    with pytest.raises(ValueError, match="got good 'no' in row 'p0', wanted 'yes', which trained"):
        learn.selection.corrected(table, df.assign(good=df.good[::-1].to_numpy()))

# Several labels
TAGS = 'cold','red','blue'

def several(get_y, df, block):
    blocks = DataBlock((TransformBlock,block), get_x=lambda row: torch.tensor([float(row.x)]), get_y=get_y,
        splitter=IndexSplitter(range(9, 12)))
    dls = blocks.dataloaders(df, bs=4, drop_last=False)
    learn = Learner(dls, nn.Linear(1, 3), loss_func=BCEWithLogitsLossFlat()).watch_items(valid=True)
    return quiet_fit(learn, 1)

def tags_of(i): return [tag for k,tag in enumerate(TAGS) if (i>>k)&1]

def in_one_column():
    df = pd.DataFrame(dict(x=np.arange(12)/12, tags=['|'.join(tags_of(i)) for i in range(12)]))
    learn = several(ColReader('tags', label_delim='|'), df, MultiCategoryBlock)
    return df,learn,lambda df: [o.split('|') for o in df.tags]

def in_three_columns():
    flags = {tag: [i>>k&1 for i in range(12)] for k,tag in enumerate(TAGS)}
    df = pd.DataFrame(dict(x=np.arange(12)/12) | flags)
    learn = several(ColReader(list(TAGS)), df, MultiCategoryBlock(encoded=True, vocab=[*TAGS]))
    return df,learn,lambda df: [[tag for tag in TAGS if row[tag]] for _,row in df.iterrows()]

def by_a_function():
    df = pd.DataFrame(dict(x=np.arange(12)/12))
    learn = several(lambda row: tags_of(round(12*row.x)), df, MultiCategoryBlock(vocab=[*TAGS]))
    return df,learn,lambda df: [o.split(';') for o in df.label]

@pytest.mark.parametrize('made', [in_one_column,in_three_columns,by_a_function])
def test_several_labels_are_corrected_one_by_one_or_in_columns(made, tmp_path):
    df,learn,read = made()
    found = learn.selection.suspects()
    tags = [o.removeprefix('no ') for o in found.label]
    line = dict(zip(zip(found.index, tags), range(len(found))))
    table = found[['label']].astype(object).assign(part=found.part)
    table.iloc[line[5,'cold'],0] = 'no cold'
    table.iloc[line[5,'red'],0] = 'red'
    table.iloc[line[10,'blue'],0] = 'blue'
    table.iloc[line[7,'blue'],0] = 'unsure'
    table.to_csv(tmp_path/'lines.csv')
    wanted = {i: {*tags_of(i)} for i in range(12)} | {5: {'red','blue'}, 10: {'red','blue'}}
    del wanted[7]
    for handed in (table,tmp_path/'lines.csv'):
        frame = learn.selection.corrected(handed)
        assert {i: {*tags}-{''} for i,tags in zip(frame.index, read(frame))}==wanted
        assert frame[['x']].equals(df[['x']].drop(7))

    frame = learn.selection.corrected({5: ['red','blue'], 3: ['cold','blue'], 0: []}) # all labels of an item
    got = {i: {*tags}-{''} for i,tags in zip(frame.index, read(frame))}
    assert got=={i: {*tags_of(i)} for i in range(12)} | {5: {'red','blue'}, 3: {'cold','blue'}}
    assert frame.columns.drop(['is_valid','label'], errors='ignore').tolist()==df.columns.tolist()
    for column in df: assert frame[column].dtype==df[column].dtype
    with pytest.raises(ValueError, match='answers that disagree on the item .*, of which one is .no red.'):
        learn.selection.corrected(pd.DataFrame(dict(row=[5,5], label=['red','no red'])))

# Masks
def test_masks_are_listed_with_their_files_to_be_drawn_anew(tmp_path):
    from fastai.vision.all import ImageBlock, MaskBlock, Image
    rng = np.random.default_rng(0)
    for i in range(12):
        for kind,pixels in dict(img=rng.integers(0, 255, (8,8,3)), msk=rng.integers(0, 2, (8,8))).items():
            (tmp_path/kind).mkdir(exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path/kind/f'{i}.png')
    block = DataBlock((ImageBlock,MaskBlock(codes=['no','yes'])), get_y=lambda o: o.parent.parent/'msk'/o.name,
        get_items=lambda path: sorted((path/'img').iterdir()), splitter=IndexSplitter([11]))
    dls = block.dataloaders(tmp_path, path=tmp_path, bs=4, num_workers=0)
    learn = Learner(dls, nn.Conv2d(3, 2, 1), loss_func=CrossEntropyLossFlat(axis=1)).watch_items()
    found = quiet_fit(learn, 1).selection.suspects()
    assert [Path(o) for o in found['mask']]==[tmp_path/'msk'/Path(key).name for key in found.index]
    with pytest.raises(ValueError, match='targets that are no labels, such as masks'):
        learn.selection.corrected(found)


@pytest.mark.parametrize('values', [[True,False], ['y','n'], [1,0]])
def test_two_classes_of_any_kind_are_corrected_in_a_table(values):
    from fastai.tabular.all import Normalize, TabularDataLoaders, tabular_learner
    set_seed(0)
    x = torch.randn(80, 2).numpy()
    df = pd.DataFrame(dict(a=x[:,0], b=x[:,1], target=[values[int(o>0)] for o in x[:,0]]))
    dls = TabularDataLoaders.from_df(df, procs=[Normalize], cont_names=['a','b'], y_names='target',
        y_block=CategoryBlock(), valid_idx=[*range(20)], bs=16)
    selection = quiet_fit(tabular_learner(dls, layers=[8]).watch_items(), 2).selection
    key = selection.suspects().index[0]
    other = values[1-values.index(df.target[key])]
    for said in other,str(other):
        corrected = selection.corrected({key: said}, df)
        assert (corrected.target!=df.target).sum()==1
        assert corrected.target[key]==other and corrected.target.dtype==df.target.dtype

@pytest.mark.parametrize('text', ['=1+1', '+a', '-1', '@x', "'=1", "''-", "'tis", '\tx', 'plain', "'", 'a=b', ''])
def test_no_cell_of_a_list_is_run_and_all_are_read_back(text, tmp_path):
    rows = pd.DataFrame({'file': [f'{text}/a.png', 'b.png'], 'margin': [-.5,.25], 'label': [text or 'x', 'cat']})
    write_list(rows, tmp_path/'list.csv')
    cells = pd.read_csv(tmp_path/'list.csv', dtype=str)[['file','label']]
    assert not cells.map(lambda o: o[0] in '=+-@\t').any(axis=None)
    pd.testing.assert_frame_equal(read_list(tmp_path/'list.csv'), rows)
