"Two processes that train together: as many steps in each, one memory, the dataset's own indices"
import math
from functools import partial

import pytest, torch
from distributed_run import CASES, data, train_all
from helpers import on_two_ranks, same

BS = 8

@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "What each of two processes has saved, by case"
    out = tmp_path_factory.mktemp('ranks')
    on_two_ranks(partial(train_all, out), out)
    return {name: [torch.load(out/f'{name}_{rank}.pt', weights_only=False) for rank in range(2)] for name in CASES}

def equal(a, b): return a.keys()==b.keys() and all(torch.equal(a[k].nan_to_num(-1.), b[k].nan_to_num(-1.)) for k in a)
def of_epoch(rank, e): return [numbers for epoch,numbers,*_ in rank['steps'] if epoch==e]
def is_idle(step): return step[3]==[0.,0.]

@pytest.mark.parametrize('name', CASES)
def test_ranks_take_the_same_steps_and_have_the_same_weights(runs, name):
    a,b = runs[name]
    assert [epoch for epoch,*_ in a['steps']]==[epoch for epoch,*_ in b['steps']] and len(a['steps'])>=8
    trained = {k for k in a['weights'] if 'running' not in k and 'tracked' not in k} # each rank has statistics of its own
    assert all(torch.equal(a['weights'][k], b['weights'][k]) for k in trained)

@pytest.mark.parametrize('name', CASES)
def test_the_running_loader_passes_for_the_distributed_one(runs, name):
    "`DistributedTrainer` would wrap another one, and each rank would have half of its items"
    for rank in runs[name]: assert rank['loaders']=={(True,True)}

@pytest.mark.parametrize('name', CASES)
def test_nothing_waits_between_epochs(runs, name):
    for rank in runs[name]: assert not rank.get('waiting') and (not rank.get('left') or name=='cancelled_sb')

@pytest.mark.law(1)
@pytest.mark.parametrize('name', ['all_sb', 'all_stale', 'all_hard', 'all_own', 'dropped_all'])
def test_selecting_everything_is_plain_distributed_training(runs, name):
    for ours,plain in zip(runs[name], runs['dropped' if name=='dropped_all' else 'plain']):
        assert [numbers for _,numbers,*_ in ours['steps']]==[numbers for _,numbers,*_ in plain['steps']]
        assert same(ours['weights'], plain['weights'])

@pytest.mark.parametrize('name', ['stale', 'stale_batchwise', 'guarded', 'info', 'random_before', 'all_stale', 'favor_hard', 'drop_easy', 'prioritized', 'seta', 'replayed'])
def test_item_indices_are_the_datasets_own(runs, name):
    for rank in runs[name]:
        assert all(idx==numbers or is_idle(step) for step in rank['steps'] for _,numbers,idx,_ in [step])

@pytest.mark.parametrize('name', ['stale', 'stale_batchwise', 'guarded', 'info', 'all_stale', 'cancelled', 'favor_hard', 'drop_easy', 'prioritized', 'seta'])
def test_memories_agree_and_count_what_both_trained(runs, name):
    a,b = runs[name]
    assert equal(a['memory'], b['memory']) and a['memory']['loss'].isfinite().all()
    picked = torch.zeros(101, dtype=torch.int32)
    for rank in (a, b):
        for _,numbers,idx,_ in rank['steps']: picked += torch.bincount(torch.tensor(numbers if idx else [], dtype=torch.int64), minlength=101).int()
    assert torch.equal(a['memory']['picked'], picked)

@pytest.mark.parametrize('name', ['random_before', 'info', 'stale', 'favor_hard', 'drop_easy', 'seta', 'replayed'])
def test_chosen_items_are_shared_out(runs, name):
    "In an epoch of chosen items no item is in both ranks but for the one that makes their numbers equal"
    for epoch in [1,3] if name=='stale' else [1,2]: # all choose by themselves there
        a,b = (sum(of_epoch(rank, epoch), []) for rank in runs[name])
        assert 0<len(a)+len(b)<101 and abs(len(a)-len(b))<=BS and len(set(a) & set(b))<=1

def test_ranks_replay_the_recorded_choices(runs):
    "Together they train what the mask of the epoch keeps, of the fit of three epochs"
    for epoch in range(3):
        trained = set(sum((sum(of_epoch(rank, epoch), []) for rank in runs['replayed']), []))
        assert trained=={i for i in range(101) if (i+epoch)%3}

def test_info_batch_weights_go_with_the_items(runs):
    weights = {}
    for rank in runs['info']:
        for epoch,numbers,_,weight in rank['steps'][7:]:
            if weight is not None: weights.setdefault(epoch, {}).update(zip(numbers, weight))
    assert weights and all(set(w.values())=={1.,2.} for w in weights.values())

# without a look
def cdf(l, losses): return (sum(o<l for o in losses)+sum(o<=l for o in losses))/2/len(losses)
CHANCES = dict(favor_hard=(lambda l, losses: cdf(l, losses), 2, 1.), drop_easy=(lambda l, losses: 0. if cdf(l, losses)<.6 else 1., 1, 0.),
    info_long=(lambda l, losses: .3 if l<sum(losses)/len(losses) else 1., None, 1.)) # and `max_rest`, `correct`

def joined(n):
    "How many are loaded where `n` are drawn: if one would be left over in each process, others come along"
    return min(101, -(-n//2)*2+1) if -(-n//2)%BS==1 else n

@pytest.mark.parametrize('name', CHANCES)
def test_two_processes_load_what_the_formula_says_of_both_their_losses(runs, name):
    chance,max_rest,correct = CHANCES[name]
    rested = [0]*101
    for e in range(8):
        losses = runs[name][0]['memories'][e]['loss'].tolist()
        p = [1. if e==0 or r==max_rest else chance(l, losses) for l,r in zip(losses, rested)]
        loaded = [i for rank in runs[name] for numbers in of_epoch(rank, e) for i in numbers]
        assert {i for i in range(101) if p[i]==1}<=set(loaded) and len(set(loaded)) in {joined(math.floor(sum(p)+1e-4)),joined(math.ceil(sum(p)-1e-4))}
        for rank in runs[name]:
            for epoch,numbers,_,weight in rank['steps']:
                if epoch==e and weight: assert sum(w!=pytest.approx(p[i]**-correct, rel=1e-4) for i,w in zip(numbers, weight))<=1
        rested = [0 if i in set(loaded) else r+1 for i,r in enumerate(rested)]

@pytest.mark.parametrize('name,u', [('prioritized',.3), ('dropped_prioritized',.6)])
def test_in_both_processes_each_batch_is_mixed_alike(runs, name, u):
    "Each has its half of the epoch's positions; as many batches as without a selection"
    plain,n = runs['dropped' if name=='dropped_prioritized' else 'plain'],90 if name=='dropped_prioritized' else 101
    for e in range(1, 4):
        order,counts = runs[name][0]['orders'][e],[]
        assert order==runs[name][1]['orders'][e] and sorted(order)==list(range(n))
        for r,(rank,other) in enumerate(zip(runs[name], plain)):
            batches = of_epoch(rank, e)
            assert [len(b) for b in batches]==[len(b) for b in of_epoch(other, e)]
            for j,batch in enumerate(batches):
                at = [r*(n+1)//2+j*BS+k for k in range(len(batch))]
                own = [k for k,a in enumerate(at) if a<n and math.floor((a+1)*u+1e-9)>math.floor(a*u+1e-9)]
                assert all(batch[k]==order[at[k]] for k in own)
                if len(batch)==BS: counts.append(len(own))
        assert max(counts)-min(counts)<=1

def test_two_processes_draw_by_both_their_losses(runs):
    got,wanted,variance = torch.zeros(101),torch.zeros(101),torch.zeros(101)
    for e in range(1, 4):
        p = runs['prioritized'][0]['memories'][e]['loss']**2
        p = p/p.sum()
        q = 30/101/101+71/101*p # 30 of the 101 positions keep their own item
        for rank in runs['prioritized']:
            for epoch,numbers,_,weight in rank['steps']:
                if epoch!=e: continue
                assert weight==pytest.approx((1/(101*q[numbers])).tolist(), rel=1e-4)
                got += torch.bincount(torch.tensor(numbers), minlength=101)
        wanted,variance = wanted+101*q,variance+101*q*(1-q)
    assert ((got-wanted).abs()<4*variance.sqrt()+1).all()

# gathered
def wanted_sizes(kept, seen):
    "How many items each rank trains in each step of an epoch, by how many it chose from each batch; None for an idle step"
    waiting,steps,was_made = [0,0],[],False
    for each in zip(*kept): # they read in lock-step, and step when the lower count allows
        waiting,was_made = [w+k for w,k in zip(waiting, each)],False
        while min(waiting)>=BS: waiting,steps,was_made = [w-BS for w in waiting],[*steps,[BS,BS]],True
    others = [s[-1]-k[-1] for s,k in zip(seen, kept)]
    while max(waiting) or not was_made: # then as often as the neediest needs
        steps.append([min(BS, max(2, w+o)) if w else None for w,o in zip(waiting, others)]) # never one item alone
        waiting,was_made = [max(0, w-BS) for w in waiting],True
    return steps

@pytest.mark.parametrize('name', ['sb', 'all_sb', 'pooled', 'gathered_random', 'empty_gathered', 'needy', 'dropped_sb'])
def test_gathered_batches_are_full_and_their_number_that_of_the_neediest(runs, name):
    idle = 0
    for e in range(4):
        rows = [rank['stats'].query(f'fit=={1+e//3} and epoch=={e%3}') for rank in runs[name]]
        loaded = [r[r.seen>0] for r in rows]
        if not (loaded[0].kept<loaded[0].seen).any() and name!='all_sb': continue # the warm-up
        wanted = wanted_sizes([r.kept.tolist() for r in loaded], [r.seen.tolist() for r in loaded]) # of seven batches in threes the last one is alone
        for r,rank in enumerate(runs[name]):
            steps = [s for s in rank['steps'] if s[0]==e]
            assert [None if is_idle(s) else len(s[1]) for s in steps]==[pair[r] for pair in wanted]
            assert rows[r].trained[rows[r].trained>0].tolist()==[len(s[1]) for s in steps] and all(len(s[1])==2 for s in steps if is_idle(s))
            trained = [i for _,numbers,_,weight in steps for i,w in zip(numbers, weight or [1.]*len(numbers)) if w]
            assert len(trained)==len(set(trained)) # each trains once
            idle += sum(map(is_idle, steps))
    assert (idle>0)==(name=='needy') or name in ('sb','gathered_random','dropped_sb')

def test_suspects_do_not_fill_up_a_batch(runs):
    for rank in runs['guarded_sb']:
        assert all(2<=len(numbers)<=BS for _,numbers,*_ in rank['steps'])
        stats = rank['stats'].query('step>=0')
        assert stats.trained.sum()>=stats.kept.sum()

def test_what_waits_in_a_cancelled_epoch_is_dropped_and_counted(runs):
    left = 0
    for rank in runs['cancelled_sb']:
        rows = rank['stats'].query('fit==1 and epoch==2')
        assert rank['left']==rows.kept.sum()-rows.trained.sum()>=0
        left += rank['left']
    assert left>0

def test_a_loader_may_say_more_than_it_hands_out(runs):
    "Only its exhaustion ends an epoch: nobody waits for a batch that does not come"
    for name in 'dropped','dropped_top','dropped_sb','dropped_all':
        for rank in runs[name]:
            assert rank['lengths']==[6]*4 and len(of_epoch(rank, 0))==5
            if name!='dropped_sb': assert all(len(of_epoch(rank, e))==5 for e in range(4))
    for rank in runs['dropped_sb']: assert all(2<=len(of_epoch(rank, e))<=5 for e in range(1, 4)) and rank['stats'].query('seen>0').groupby(['fit','epoch']).size().eq(5).all()

def test_importance_sampling_switches_on_together(runs):
    a,b = ([weight is not None for *_,weight in rank['steps']] for rank in runs['importance'])
    assert a==b and any(a) and not all(a)

def test_a_rank_without_a_choice_takes_part_without_weight(runs):
    a,b = (rank['steps'][7:] for rank in runs['empty'])
    pairs = [(len(x),wx,len(y),wy) for (_,x,_,wx),(_,y,_,wy) in zip(a, b)]
    assert set(map(str, pairs))=={str((2,[0.,0.],3,None)), str((3,None,2,[0.,0.]))}

def test_no_item_is_alone_before_loading(runs):
    sizes = [[len(numbers) for epoch,numbers,*_ in rank['steps'] if epoch] for rank in runs['left_over']]
    assert sizes[0]==sizes[1]==[BS,BS,2]*(len(sizes[0])//3)!=[] # of 17 a rank, the one left over has company

def test_data_is_numbered(): assert data()[0][:,-1].tolist()==list(range(101))
