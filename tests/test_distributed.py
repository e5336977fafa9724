"Two processes that train together: as many steps in each, one memory, the dataset's own indices"
import os, subprocess, sys
from pathlib import Path

import pytest, torch
from distributed_run import CASES, data
from helpers import same

@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "What each of two processes has saved, by case; more than 3 minutes are a deadlock"
    out,here = tmp_path_factory.mktemp('ranks'),Path(__file__).parent
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', here/'distributed_run.py', out]
    env = dict(os.environ, ACCELERATE_USE_CPU='1', OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='', PYTHONPATH=os.pathsep.join([str(here), str(here.parent)]))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert not done.returncode, done.stderr[-4000:]
    return {name: [torch.load(out/f'{name}_{rank}.pt', weights_only=False) for rank in range(2)] for name in CASES}

def equal(a, b): return a.keys()==b.keys() and all(torch.equal(a[k].nan_to_num(-1.), b[k].nan_to_num(-1.)) for k in a)

@pytest.mark.parametrize('name', CASES)
def test_ranks_take_the_same_steps_and_have_the_same_weights(runs, name):
    a,b = runs[name]
    assert [epoch for epoch,*_ in a['steps']]==[epoch for epoch,*_ in b['steps']] and len(a['steps'])>12
    trained = {k for k in a['weights'] if 'running' not in k and 'tracked' not in k} # each rank has statistics of its own
    assert all(torch.equal(a['weights'][k], b['weights'][k]) for k in trained)

@pytest.mark.parametrize('name', ['all_sb', 'all_stale'])
def test_selecting_everything_is_plain_distributed_training(runs, name):
    for ours,plain in zip(runs[name], runs['plain']):
        assert [numbers for _,numbers,*_ in ours['steps']]==[numbers for _,numbers,*_ in plain['steps']]
        assert same(ours['weights'], plain['weights'])

@pytest.mark.parametrize('name', ['stale', 'stale_batchwise', 'guarded', 'info', 'random_before', 'all_stale'])
def test_item_indices_are_the_datasets_own(runs, name):
    for rank in runs[name]:
        assert all(idx==numbers or weight==[0.]*len(numbers) for _,numbers,idx,weight in rank['steps'])

@pytest.mark.parametrize('name', ['stale', 'stale_batchwise', 'guarded', 'info', 'all_stale', 'cancelled'])
def test_memories_agree_and_count_what_both_trained(runs, name):
    a,b = runs[name]
    assert equal(a['memory'], b['memory']) and a['memory']['loss'].isfinite().all()
    picked = torch.zeros(101, dtype=torch.int32)
    for rank in (a, b):
        for _,numbers,idx,_ in rank['steps']: picked += torch.bincount(torch.tensor(numbers if idx else [], dtype=torch.int64), minlength=101).int()
    assert torch.equal(a['memory']['picked'], picked)

@pytest.mark.parametrize('name', ['random_before', 'info', 'stale'])
def test_chosen_items_are_shared_out(runs, name):
    "In an epoch of chosen items no item is in both ranks but for the one that makes their numbers equal"
    for epoch in [3] if name=='stale' else [1,2]: # all choose by themselves there
        a,b = ([i for e,numbers,*_ in rank['steps'] if e==epoch for i in numbers] for rank in runs[name])
        assert 0<len(a)+len(b)<101 and abs(len(a)-len(b))<=8 and len(set(a) & set(b))<=(8 if name=='stale' else 1) # some have waited since before

def test_info_batch_weights_go_with_the_items(runs):
    weights = {}
    for rank in runs['info']:
        for epoch,numbers,_,weight in rank['steps'][7:]:
            if weight is not None: weights.setdefault(epoch, {}).update(zip(numbers, weight))
    assert weights and all(set(w.values())=={1.,2.} for w in weights.values())

@pytest.mark.parametrize('name', ['sb', 'stale', 'guarded_sb'])
def test_gathered_batches_are_full_on_both_ranks(runs, name):
    a,b = runs[name]
    sizes = [[len(numbers) for _,numbers,*_ in rank['steps']] for rank in (a, b)]
    assert sizes[0]==sizes[1] and set(sizes[0])-{8} and all(2<=n<=8 for n in sizes[0])
    for rank in (a, b):
        stats = rank['stats'].query('step>=0')
        lost = stats.kept.sum()-stats.trained.sum()-rank['left']
        assert lost>=0 if name=='guarded_sb' else not lost # suspects that waited are left out
        emitted = stats[stats.trained>0]
        assert (emitted[emitted.step<emitted.groupby(['fit','epoch']).step.transform('max')].trained==8).all()

def test_importance_sampling_switches_on_together(runs):
    a,b = ([weight is not None for *_,weight in rank['steps']] for rank in runs['importance'])
    assert a==b and any(a) and not all(a)

def test_a_rank_without_a_choice_takes_part_without_weight(runs):
    a,b = (rank['steps'][7:] for rank in runs['empty'])
    pairs = [(len(x),wx,len(y),wy) for (_,x,_,wx),(_,y,_,wy) in zip(a, b)]
    assert set(map(str, pairs))=={str((2,[0.,0.],3,None)), str((3,None,2,[0.,0.]))}

def test_no_item_is_alone_before_loading(runs):
    sizes = [[len(numbers) for epoch,numbers,*_ in rank['steps'] if epoch] for rank in runs['left_over']]
    assert sizes[0]==sizes[1] and set(sizes[0])=={8} # of 17 a rank, the one left over stands back

def test_ranks_without_a_choice_wait_together(runs):
    a,b = (rank['stats'] for rank in runs['empty_gathered'])
    assert a.trained.tolist()==b.trained.tolist() and 0 in set(a.kept) & set(b.kept) and a.kept.tolist()!=b.kept.tolist()
    for stats,rank in zip((a, b), runs['empty_gathered']): assert stats.kept.sum()==stats.trained.sum()+rank['left']

def test_data_is_numbered(): assert data()[0][:,-1].tolist()==list(range(101))
