"Two processes that train together: as many steps in each, one memory, the dataset's own indices"
import math
from functools import partial

import pytest, torch
from distributed_run import CASES, train_all
from helpers import on_two_ranks, same

pytestmark = pytest.mark.slow # two processes

N,BS = 101,8

@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "What each of two processes has saved, by case"
    out = tmp_path_factory.mktemp('ranks')
    on_two_ranks(partial(train_all, out), out)
    def saved(name, rank): return torch.load(out/f'{name}_{rank}.pt', weights_only=False)
    return {name: [saved(name, rank) for rank in range(2)] for name in CASES}

def are_equal(a, b):
    if isinstance(a, int): return a==b
    return torch.equal(a.nan_to_num(-1.), b.nan_to_num(-1.))

def steps_of(rank, epoch): return [step for step in rank['steps'] if step.epoch==epoch]

def batches_of(rank, epoch): return [step.items for step in steps_of(rank, epoch)]

def items_of(rank, epoch): return sum(batches_of(rank, epoch), [])

def items_of_both(ranks, epoch): return sum((items_of(rank, epoch) for rank in ranks), [])

def times(items): return torch.bincount(torch.tensor(items, dtype=torch.int64), minlength=N)

@pytest.mark.parametrize('name', CASES)
def test_ranks_take_the_same_steps_and_have_the_same_weights(runs, name):
    a,b = runs[name]
    assert [step.epoch for step in a['steps']]==[step.epoch for step in b['steps']]
    assert len(a['steps'])>=8
    for name,of_a in a['weights'].items():
        is_statistic = 'running' in name or 'tracked' in name # of which each rank has its own
        assert is_statistic or torch.equal(of_a, b['weights'][name])

@pytest.mark.law(1)
@pytest.mark.parametrize('name', ['all_sb', 'all_stale', 'all_hard', 'all_own', 'all_as_they_are', 'dropped_all'])
def test_selecting_everything_is_plain_distributed_training(runs, name):
    plainly = runs['dropped' if name=='dropped_all' else 'plain']
    for ours,plain in zip(runs[name], plainly):
        assert [step.items for step in ours['steps']]==[step.items for step in plain['steps']]
        assert same(ours['weights'], plain['weights'])

WITH_INDICES = ['stale', 'stale_batchwise', 'tracked', 'info', 'random_before', 'all_stale', 'favor_hard', 'drop_easy',
    'prioritized', 'early', 'balanced', 'balanced_few', 'seta', 'thirds']

@pytest.mark.parametrize('name', WITH_INDICES)
def test_item_indices_are_the_datasets_own(runs, name):
    for rank in runs[name]: assert all(step.idx==step.items or step.is_idle for step in rank['steps'])

WITH_MEMORY = ['stale', 'stale_batchwise', 'tracked', 'info', 'all_stale', 'cancelled', 'favor_hard', 'drop_easy',
    'prioritized', 'early', 'seta']

@pytest.mark.parametrize('name', WITH_MEMORY)
def test_memories_agree_and_count_what_both_trained(runs, name):
    a,b = runs[name]
    memory = a['memory']
    assert memory.keys()==b['memory'].keys()
    assert all(are_equal(memory[k], b['memory'][k]) for k in memory)
    assert memory['loss'].isfinite().all()

    trained = [i for rank in (a, b) for step in rank['steps'] if step.idx for i in step.items]
    assert torch.equal(memory['picked'], times(trained).int())

@pytest.mark.parametrize('name', ['random_before', 'info', 'stale', 'favor_hard', 'drop_easy', 'seta', 'thirds'])
def test_chosen_items_are_shared_out(runs, name):
    "In an epoch of chosen items no item is in both ranks but for the one that makes their numbers equal"
    for epoch in [1,3] if name=='stale' else [1,2]: # all choose by themselves there
        a,b = (items_of(rank, epoch) for rank in runs[name])
        assert 0<len(a)+len(b)<N
        assert abs(len(a)-len(b))<=BS
        assert len(set(a) & set(b))<=1

# without a look
def mid_rank(loss, losses): return (sum(o<loss for o in losses)+sum(o<=loss for o in losses))/2/len(losses)

def drops_easy(loss, losses): return 0. if mid_rank(loss, losses)<.6 else 1.

def prunes_below_the_mean(loss, losses): return .3 if loss<sum(losses)/len(losses) else 1.

CHANCES = dict( # with `max_rest` and `correct`
    favor_hard=(mid_rank, 2, 1.),
    drop_easy=(drops_easy, 1, 0.),
    info_long=(prunes_below_the_mean, None, 1.))

def joined(n):
    "How many are loaded where `n` are drawn: if one would be left over in each process, others come along"
    of_each = -(-n//2)
    return min(N, of_each*2+1) if of_each%BS==1 else n

def n_weighted_otherwise(step, chances, correct):
    weights = zip(step.items, step.weight)
    return sum(w!=pytest.approx(chances[i]**-correct, rel=1e-4) for i,w in weights)

@pytest.mark.parametrize('name', CHANCES)
def test_two_processes_load_what_the_formula_says_of_both_their_losses(runs, name):
    chance,max_rest,correct = CHANCES[name]
    rested = [0]*N
    for epoch in range(8):
        memory = runs[name][0]['memories'][epoch]
        losses = [math.nan]*N if memory is None else memory['loss'].tolist()
        def chance_of(loss, rest): return 1. if epoch==0 or rest==max_rest else chance(loss, losses)
        chances = [chance_of(loss, rest) for loss,rest in zip(losses, rested)]
        loaded = set(items_of_both(runs[name], epoch))
        fewest,most = math.floor(sum(chances)+1e-4),math.ceil(sum(chances)-1e-4)
        assert {i for i in range(N) if chances[i]==1}<=loaded
        assert len(loaded) in (joined(fewest), joined(most))

        for rank in runs[name]:
            for step in steps_of(rank, epoch):
                if step.weight: assert n_weighted_otherwise(step, chances, correct)<=1
        rested = [0 if i in loaded else rest+1 for i,rest in enumerate(rested)]

def test_two_processes_draw_by_both_their_losses(runs):
    ranks,trained = runs['prioritized'],[]
    wanted,variance = torch.zeros(N),torch.zeros(N)
    for epoch in range(1, 4):
        power = ranks[0]['memories'][epoch]['loss']**2
        chances = 30/N/N+71/N*power/power.sum() # 30 of the 101 positions keep their own item
        wanted += N*chances
        variance += N*chances*(1-chances)
        trained += items_of_both(ranks, epoch)
        for rank in ranks:
            for step in steps_of(rank, epoch):
                assert step.weight==pytest.approx((1/(N*chances[step.items])).tolist(), rel=1e-4)
    assert ((times(trained)-wanted).abs()<4*variance.sqrt()+1).all()

# gathered
def wanted_sizes(kept, seen):
    "How many items each rank trains in each step, by how many it chose from each batch; None for an idle step"
    waiting,steps,was_made = [0,0],[],False
    for chosen in zip(*kept): # they read in lock-step, and step when the lower count allows
        waiting,was_made = [w+k for w,k in zip(waiting, chosen)],False
        while min(waiting)>=BS:
            steps.append([BS,BS])
            waiting,was_made = [w-BS for w in waiting],True

    others = [s[-1]-k[-1] for s,k in zip(seen, kept)]
    while max(waiting) or not was_made: # then as often as the neediest needs
        steps.append([last_size(w, o) for w,o in zip(waiting, others)])
        waiting,was_made = [max(0, w-BS) for w in waiting],True
    return steps

def last_size(waiting, others):
    "Never one item alone"
    return min(BS, max(2, waiting+others)) if waiting else None

def stats_of(ranks, epoch): return [rank['stats'].query(f'fit=={1+epoch//3} and epoch=={epoch%3}') for rank in ranks]

def is_warm_up(loaded): return not (loaded.kept<loaded.seen).any()

def trained_in(steps):
    "The items that have a weight"
    weighted = [pair for step in steps for pair in zip(step.items, step.weight or [1.]*len(step.items))]
    return [i for i,weight in weighted if weight]

GATHERED = ['sb', 'all_sb', 'pooled', 'gathered_random', 'empty_gathered', 'needy', 'dropped_sb']
BY_CHANCE = ['sb', 'gathered_random', 'dropped_sb'] # one rank may run out of items before the other

@pytest.mark.parametrize('name', GATHERED)
def test_gathered_batches_are_full_and_their_number_that_of_the_neediest(runs, name):
    n_idle = 0
    for epoch in range(4):
        stats = stats_of(runs[name], epoch)
        loaded = [rows[rows.seen>0] for rows in stats] # of seven batches in threes the last one is alone
        if name!='all_sb' and is_warm_up(loaded[0]): continue
        sizes = wanted_sizes([rows.kept.tolist() for rows in loaded], [rows.seen.tolist() for rows in loaded])
        for rank,rows,wanted in zip(runs[name], stats, zip(*sizes), strict=True):
            steps = steps_of(rank, epoch)
            idle = [step for step in steps if step.is_idle]
            assert [None if step.is_idle else len(step.items) for step in steps]==list(wanted)
            assert rows.trained[rows.trained>0].tolist()==[len(step.items) for step in steps]
            assert all(len(step.items)==2 for step in idle)

            trained = trained_in(steps)
            assert len(trained)==len(set(trained)) # each trains once
            n_idle += len(idle)

    if name not in BY_CHANCE: assert (n_idle>0)==(name=='needy')

@pytest.mark.parametrize('name', ['dropped','dropped_top','dropped_sb','dropped_all'])
def test_a_loader_may_say_more_than_it_hands_out(runs, name):
    "Only its exhaustion ends an epoch: nobody waits for a batch that does not come"
    for rank in runs[name]:
        first,*others = (len(batches_of(rank, epoch)) for epoch in range(4))
        assert rank['lengths']==[6]*4
        assert first==5
        if name=='dropped_sb': assert all(2<=n<=5 for n in others)
        else: assert others==[5]*3

def test_a_rank_without_a_choice_takes_part_without_weight(runs):
    a,b = (rank['steps'][7:] for rank in runs['empty'])
    def taken(step): return len(step.items),step.weight
    idle,chosen = (2,[0.,0.]),(3,None)
    pairs = [(taken(of_a), taken(of_b)) for of_a,of_b in zip(a, b)]
    assert all(pair in ((idle,chosen), (chosen,idle)) for pair in pairs)
    assert (idle,chosen) in pairs
    assert (chosen,idle) in pairs
