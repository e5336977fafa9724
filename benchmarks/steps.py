"Whole steps against plain ones: each method at three kept shares, beside what the parts take by themselves"
from common import *

def methods(share):
    "Each method that chooses from a batch, at a kept share"
    return dict(
        batch_loss_filter=BatchLossFilterCallback(min_loss_perc=0, min_sample_perc=share, warmup=0),
        selective_backprop=SelectiveBackpropCallback(keep=share, warmup=0),
        composer=SelectiveBackpropCallback(keep=share, gather=False, warmup=0),
        top_loss=TopLossCallback(share, warmup=0),
        importance_sampling=ImportanceSamplingCallback(round(1/share), tau=0, warmup=0),
        one_pass=TopLossCallback(share, warmup=0, passes=1),
        random_subset=RandomSubsetCallback(share, warmup=0))

GATHERS = 'selective_backprop','importance_sampling' # full batches, which take several batches of the loader

def kinds_of(name, share, is_scored):
    "What is timed in turn; steps that gather differ from one another, so they have many turns"
    selecting = ['select']
    if name in GATHERS: selecting = ['select']*round(1/share)*round(6*share+2)
    scoring = ['score'] if is_scored else []
    return ['plain', *scoring, share, *selecting, 'plain again']

def measure(net, bs, name, share, cb, args):
    "A row for each repeat: the selecting step, its parts, and a plain step beside another plain step"
    times = in_turn(net, bs, cb, kinds_of(name, share, cb.is_scored), args)
    plain,small,step = times.plain,times[str(share)],times['select']
    is_one_pass = name=='one_pass'
    score = times['score'] if cb.is_scored and not is_one_pass else 0*plain
    train = times.trained*plain if name in GATHERS else small
    parts = plain if is_one_pass else score+train
    limit = 1. if is_one_pass else score/plain+times.trained

    scoring = cb.scorer.scoring
    rows = pd.DataFrame(dict(
        net=net,
        bs=bs,
        method=name,
        scale_factor=scoring.scale_factor,
        precision=scoring.precision,
        share=share,
        repeat=times.index,
        plain_seconds=plain,
        plain_again=times['plain again']/plain,
        score=score/plain,
        small_step=small/plain,
        parts=parts/plain,
        step=step/plain,
        step_of_parts=step/parts,
        trained=times.trained,
        limit=limit))
    return rows.to_dict('records')

def main():
    args = arguments(__doc__)
    is_gpu = torch.device(args.device).type!='cpu'
    rows = []
    for share in 1/2,1/3,1/4:
        bs = 512 if is_gpu else 64
        for name,cb in methods(share).items(): rows += measure('small_resnet', bs, name, share, cb, args)
    for net in ('resnet18','cifar_resnet18'):
        bs = 512 if is_gpu else 128
        for kwargs in dict(), dict(scale_factor=.5):
            cb = TopLossCallback(1/3, warmup=0, **kwargs)
            rows += measure(net, bs, 'top_loss', 1/3, cb, args)

    df = save(rows, 'steps', args)
    by = df.groupby(['net','bs','method','scale_factor','precision','share'], sort=False, dropna=False)
    told = ['plain_again','score','small_step','trained','parts','step','step_of_parts','limit']
    print(by[told].median().round(3).to_string())

if __name__=='__main__': main()
