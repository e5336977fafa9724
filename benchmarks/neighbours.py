"The nearest neighbours of 50,000 items among as many, as `find_copies` looks for them, beside the products alone"
from common import *
from selback.core.neighbours import nearest, unit

def seconds(call):
    start = clock()
    call()
    return clock()-start

def main():
    args = arguments(__doc__, items=dict(type=int, default=50_000), features=dict(type=int, default=256))
    x = unit(torch.randn(args.items, args.features)).half().to(args.device)
    own = torch.arange(args.items, device=args.device)
    def products(size=2048):
        for rows in x.split(size):
            for others in x.split(4*size): rows.float()@others.float().T
    def found(): nearest(x, x, 8, own)
    rows = []
    for repeat in range(args.repeats):
        alone = seconds(products)
        rows.append(dict(repeat=repeat, items=args.items, features=args.features, products_seconds=alone,
            seconds=(took := seconds(found)), ratio=took/alone, threads=torch.get_num_threads()))
        print(rows[-1], flush=True)
    save(rows, 'neighbours', args)

if __name__=='__main__': main()
