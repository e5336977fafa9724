"The comparison: what runs cost, what it amounts to, the command"
import subprocess, sys

import pandas as pd, pytest, torch
from helpers import *
from selback.compare import *
from selback.compare import main

def run(seconds, losses, items=None):
    return pd.DataFrame(dict(seconds=seconds, backpropagated=items or [s*100 for s in seconds], forwarded=[s*200 for s in seconds],
        valid_loss=losses, error=[l/2 for l in losses], epoch=range(1, len(losses)+1)))

PLAIN,FAST,CONTROL = run([2.,4,6,8],[1.,.6,.5,.55]),run([1.,2,3,4],[1.,.8,.58,.57]),run([1.,2,3,4],[1.,.9,.8,.8])
RUNS = pd.concat([r.assign(method=m, seed=s) for s in (0,1) for m,r in
    (('none',PLAIN), ('top_loss',FAST), ('random_subset(keep=.5)',CONTROL))])

def test_summary_by_hand():
    s = summarize(RUNS).set_index(['method','seed'])
    row = s.loc['top_loss',0]
    assert row['time to target']==3 and row['items to target']==300 # .58 <= 1.2*.5
    assert row['best loss']==.57 and row.seconds==4 and s.loc['none',0]['time to target']==4
    assert row['vs random, equal time']==pytest.approx(.57/.8-1) and row['vs plain, equal items']==pytest.approx(.57/.6-1)
    assert s.loc['random_subset(keep=.5)',1][['time to target','items to target']].isna().all()
    assert 'time to error target' not in s and 'time to error target' in summarize(RUNS, n_valid=2000)

def test_verdict_says_what_was_lost():
    said = verdict(summarize(RUNS))
    assert said.startswith("top_loss reached 1.2 times plain training's best validation loss in 0.75 of its time, with 0.75 of its back-propagated items")
    assert 'against plain training its loss was 5% lower' in said and 'random choice its loss was 29% lower' in said and said.endswith('.')
    worse = RUNS.assign(valid_loss=RUNS.valid_loss.where(RUNS.method!='top_loss', RUNS.valid_loss*3))
    said = verdict(summarize(worse))
    assert said.startswith('top_loss did not reach') and '114% higher' in said
    mixed = worse.assign(valid_loss=worse.valid_loss.where((worse.method!='top_loss') | (worse.seed==0), worse.valid_loss/5))
    assert 'not for every seed' in verdict(summarize(mixed))
    assert 'no control' in verdict(summarize(RUNS[~RUNS.method.str.startswith('random')]))
    assert 'nothing to compare' in verdict(summarize(RUNS[RUNS.method=='none']))

def test_runs_count_their_cost():
    def get_learner(): return Learner(dls_of(*class_data(132), drop_last=True), mlp(), loss_func=CrossEntropyLossFlat(), metrics=error)
    methods = ['none','top_loss(keep=.25)','random_subset(keep=.25)','selective_backprop(beta=9)']
    runs = compare(get_learner, methods, epochs=3, seeds=2)
    last = runs[runs.epoch==3].set_index(['method','seed'])
    assert len(runs)==3*2*4
    for seed in (0,1):
        assert last.loc[('none',seed), ['forwarded','backpropagated']].tolist()==[288,288]
        assert last.loc[('top_loss(keep=.25)',seed), ['forwarded','backpropagated']].tolist()==[96+2*24+2*96, 96+2*24]
        assert last.loc[('random_subset(keep=.25)',seed), ['forwarded','backpropagated']].tolist()==[96+2*24]*2
        sb = last.loc[('selective_backprop(beta=9)',seed)]
        assert sb.backpropagated%16==0 and sb.forwarded==sb.backpropagated+2*96
    assert (runs.groupby(['method','seed']).seconds.diff().dropna()>0).all()
    warm = runs[runs.epoch==1].groupby('seed').valid_loss.nunique() # the warm-up is plain training with the same seed
    assert warm.tolist()==[1,1]

def error(pred, y): return (pred.argmax(1)!=y).float().mean()

def test_bad_words_fail_before_the_first_run():
    def never(): raise AssertionError('a run was started')
    for spec,match in [('ohem','wanted one of none, .*top_loss'), ('top_loss(keep=7)','keep: got 7'), ('top_loss(keep=',"wanted a name or a call"), ('top_loss(kep=.5)','kep'),
        ('top_loss(keep=x)','method'), ('1+1','method')]:
        with pytest.raises((ValueError,TypeError), match=match): compare(never, ['none', spec], 1, 1)
    with pytest.raises(ValueError, match="arch: got 'resnet0'"): get_model('resnet0', 3)
    with pytest.raises(ValueError, match="data: got 'no/where'"): get_dls('no/where')

def test_the_command_answers_bad_input_in_one_line(tmp_path, capsys):
    (tmp_path/'empty').mkdir()
    for kwargs,match in [(dict(methods='ohem'), "got 'ohem'"), (dict(methods='top_loss(keep=2)'), 'keep: got 2'), (dict(methods=''), "got ''"), (dict(epochs=0), 'epochs: got 0'),
        (dict(seeds=0), 'seeds: got 0'), (dict(bs=0), 'bs: got 0'), (dict(bs=10**5), 'a batch of 100000'), (dict(lr=-1.), 'lr: got -1'),
        (dict(data=str(tmp_path/'empty')), 'without images'), (dict(data='no/where'), 'no/where'), (dict(arch='resnet0'), 'resnet0')]:
        with pytest.raises(SystemExit) as e: main(**{'data':'digits', 'out':str(tmp_path/'out'), **kwargs})
        said = capsys.readouterr().err
        assert e.value.code==2 and match in said and said.startswith('selback-compare: error:') and said.count('\n')==1
    assert not (tmp_path/'out').exists()

def test_plots_and_tables_for_any_order_of_methods():
    plot_runs(RUNS[RUNS.method=='top_loss'])
    shown = show_table(summarize(RUNS, n_valid=2000).assign(forwarded=22528))
    assert shown.loc['forwarded','none']=='22,528' and shown.loc['vs random, equal time','top_loss']=='-29%' and shown.loc['vs plain, equal time','none']=='-'
    assert 'nothing was left out' in verdict(summarize(RUNS.assign(backpropagated=900)))
    assert 'one seed' in verdict(summarize(RUNS[RUNS.seed==0]))

def test_methods_are_split_outside_of_brackets():
    assert split_methods('none,top_loss(keep=.5, warmup=0) , random_subset')==['none','top_loss(keep=.5, warmup=0)','random_subset']

def test_networks(): assert get_model('small_resnet', 7)(torch.randn(2,3,32,32)).shape==get_model('resnet18', 7)(torch.randn(2,3,32,32)).shape==(2,7)

@pytest.fixture
def folder(tmp_path):
    from PIL import Image
    rng = np.random.default_rng(0)
    for part,n in (('train',16),('valid',8)):
        for c in ('cat','dog'):
            (tmp_path/part/c).mkdir(parents=True)
            for i in range(n): Image.fromarray(rng.integers(0, 256, (20,20,3), dtype=np.uint8)).save(tmp_path/part/c/f'{i}.png')
    return tmp_path

def test_a_folder_of_class_folders(folder):
    dls = get_dls(str(folder), 8)
    assert (len(dls.train_ds), len(dls.valid_ds), dls.c)==(32,16,2)
    dls = get_dls(str(folder/'train'), 8)
    assert (len(dls.train_ds), len(dls.valid_ds), dls.c)==(26,6,2)

def test_the_command(folder, capsys):
    out = folder/'out'
    main(data=str(folder), methods='none,top_loss(keep=.5),random_subset(keep=.5)', epochs=2, seeds=1, bs=8, out=str(out))
    said = capsys.readouterr().out
    assert 'backpropagated' in said and said.strip().splitlines()[-1].endswith('.')
    runs,summary = pd.read_csv(out/'runs.csv'),pd.read_csv(out/'summary.csv')
    assert len(runs)==6 and {'arch','device','torch','fastai','lr','bs'}<=set(runs.columns) and len(summary)==3
    assert (out/'compare.png').stat().st_size>10000

def test_help():
    said = subprocess.run([sys.executable, '-m', 'selback.compare', '--help'], capture_output=True, text=True).stdout
    said = ' '.join(said.split())
    for word in ('--data','--methods','--epochs','--seeds','--arch','--bs','--out','cifar10','folder of class folders'): assert word in said
