"Whole steps against plain ones: each method at three kept shares, beside what the parts take by themselves"
from common import *

def methods(s):
    "Each method that chooses from a batch, at a kept share of `s`"
    return dict(batch_loss_filter=BatchLossFilterCallback(min_loss_perc=0, min_sample_perc=s, warmup=0), selective_backprop=SelectiveBackpropCallback(keep=s, warmup=0),
        composer=SelectiveBackpropCallback(keep=s, gather=False, warmup=0), top_loss=TopLossCallback(s, warmup=0), importance_sampling=ImportanceSamplingCallback(round(1/s), tau=0, warmup=0),
        one_pass=TopLossCallback(s, warmup=0, passes=1), random_subset=RandomSubsetCallback(s, warmup=0))

def measure(net, bs, name, s, cb, args):
    "A row for each repeat: the selecting step, its parts, and a plain step beside another plain step"
    many = [k for _ in range(round(6*s+2)) for k in ['select']*round(1/s)] if name in ('selective_backprop','importance_sampling') else ['select'] # gathering steps differ
    kinds = ['plain', *(['score'] if cb.scored else []), s, *many, 'plain again']
    t = in_turn(net, bs, cb, kinds, args)
    score = t['score'] if 'score' in t and name!='one_pass' else 0*t.plain
    whole = name in ('selective_backprop','importance_sampling')
    parts = t.plain if name=='one_pass' else score+(t.trained*t.plain if whole else t[str(s)])
    return [dict(net=net, bs=bs, method=name, scale_factor=cb.scorer.scoring.scale_factor, precision=cb.scorer.scoring.precision, share=s, repeat=r, plain_seconds=t.plain[r],
        plain_again=t['plain again'][r]/t.plain[r], score=score[r]/t.plain[r], small_step=t[str(s)][r]/t.plain[r], parts=parts[r]/t.plain[r],
        step=t['select'][r]/t.plain[r], step_of_parts=t['select'][r]/parts[r], trained=t.trained[r], limit=score[r]/t.plain[r]+t.trained[r] if name!='one_pass' else 1.) for r in t.index]

def main():
    args = arguments(__doc__)
    gpu = torch.device(args.device).type!='cpu'
    rows = []
    for s in 1/2,1/3,1/4:
        for name,cb in methods(s).items(): rows += measure('small_resnet', 512 if gpu else 64, name, s, cb, args)
    for net in ('resnet18', 'cifar_resnet18'):
        bs = 512 if gpu else 128
        for kwargs in dict(), dict(scale_factor=.5):
            rows += measure(net, bs, 'top_loss', 1/3, TopLossCallback(1/3, warmup=0, **kwargs), args)
    df = save(rows, 'steps', args)
    print(df.groupby(['net','bs','method','scale_factor','precision','share'], sort=False, dropna=False)[['plain_again','score','small_step','trained','parts','step','step_of_parts','limit']].median().round(3).to_string())

if __name__=='__main__': main()
