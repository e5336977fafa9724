"""Hand-made faults, each of which a test that anyone runs must catch: `make faults`

Each fault is a line of the package and what it becomes. It is made in a copy, where the fast cases of some test files
are run until one fails. `python tests/faults.py margin_sign` makes one only, `--out FILE` writes the table."""
import argparse, re, shutil, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

root = Path(__file__).resolve().parents[1]
COPIED = 'selback','tests','conftest.py','pyproject.toml'

class Fault(NamedTuple):
    name:str
    file:str # In `selback/`
    line:str # As it is, once in that file
    becomes:str
    tests:str # Files that should catch it: `policies` is `tests/test_policies.py`

FAULTS = [
    # what a sampler draws
    Fault('rest_without_order', 'core/loop.py',
        '    return items[nth>=trained[items]]',
        '    return items[trained[items]==0]',
        'sampler'),
    Fault('resumed_for_good', 'core/loop.py',
        '        is_resumed = self._resumed==self.memory.epochs',
        '        is_resumed = self._resumed is not None',
        'sampler'),
    # which items are copies
    Fault('farthest_first', 'core/neighbours.py',
        '            here = near.topk(min(k, near.shape[1]), 1)',
        '            here = near.topk(min(k, near.shape[1]), 1, largest=False)',
        'neighbours found_copies'),
    Fault('own_neighbour', 'core/neighbours.py',
        '    near[rows,own[rows]] = -torch.inf',
        '    near[rows,own[rows]-1] = -torch.inf',
        'neighbours'),
    Fault('leaks_stay', 'clean/copies.py',
        '    trained = {group[number(o)] for pair in places for o in pair if o[0]==0}',
        '    trained = {group[number(o)] for pair in places for o in pair if o[0]==1}',
        'found_copies'),
    Fault('groups_are_torn', 'clean/copies.py',
        "    members = np.split(group.argsort(kind='stable'), np.bincount(group).cumsum()[:-1])",
        '    members = np.split(np.arange(len(group)), np.bincount(group).cumsum()[:-1])',
        'found_copies'),
    Fault('marks_are_words', 'clean/rows.py',
        "for word in o if word not in ('xxbos','xxmaj','xxup'))",
        'for word in o)',
        'found_copies'),
    # what is chosen
    Fault('easiest_first', 'core/policies.py',
        '    if not n_bottom: return _first(hardest_first, n_top, multiple_of)',
        '    if not n_bottom: return _first(hardest_first.flip(0), n_top, multiple_of)',
        'policies fuzz laws'),
    Fault('share_of_the_easiest', 'core/policies.py',
        'losses,order = scores.sort(descending=True)',
        'losses,order = scores.sort()',
        'policies fuzz matrix'),
    Fault('one_too_few', 'core/policies.py',
        'return 1+int(sums.searchsorted(sums[-1]*share*(1-1e-6)))',
        'return max(1, int(sums.searchsorted(sums[-1]*share*(1-1e-6))))',
        'policies fuzz matrix'),
    Fault('cdf_from_above', 'core/policies.py',
        'prob = mid_rank(scores, history)**beta',
        'prob = (1-mid_rank(scores, history))**beta',
        'policies fuzz matrix'),
    Fault('favors_the_easy', 'core/policies.py',
        'return mid_rank(loss, loss)**check_range',
        'return (1-mid_rank(loss, loss))**check_range',
        'inclusion policies'),
    Fault('losses_of_another_batch', 'core/policies.py',
        'self.values = new[-self.size:]',
        'self.values = new[:self.size]',
        'policies matrix fuzz'),
    Fault('ranks_of_easiest', 'core/policies.py',
        'return _first(keys.argsort(descending=True), _share_of(n, keep)',
        'return _first(keys.argsort(), _share_of(n, keep)',
        'policies fuzz'),
    Fault('quantile_of_the_wrong_side', 'core/policies.py',
        'return torch.where(mid_rank(loss, loss)<quantile, 1-drop, 1.)',
        'return torch.where(mid_rank(loss, loss)>quantile, 1-drop, 1.)',
        'inclusion policies'),
    Fault('prunes_hard_items', 'core/policies.py',
        'return torch.where(loss<loss.mean(dtype=sum_dtype(loss)), 1-prune, 1.)',
        'return torch.where(loss>loss.mean(dtype=sum_dtype(loss)), 1-prune, 1.)',
        'inclusion policies'),
    Fault('window_an_epoch_late', 'core/policies.py',
        'first = epoch%(n_found-width+1)',
        'first = max(0, epoch-1)%(n_found-width+1)',
        'seta matrix'),
    Fault('priority_squared', 'core/policies.py',
        'weight = relative**alpha',
        'weight = relative**(2*alpha)',
        'prioritized policies'),
    Fault('classes_not_balanced', 'core/policies.py',
        'chance = sizes**(1-power)',
        'chance = sizes**power',
        'balanced'),
    Fault('alone_in_a_batch', 'core/policies.py',
        'if len(rows)!=1 or len(scores)<2: return chosen',
        'return chosen',
        'policies matrix'),
    # weights
    Fault('weight_squared', 'core/policies.py',
        'weight = 1/(len(scores)*drawn)',
        'weight = (1/(len(scores)*drawn))**2',
        'policies fuzz'),
    Fault('weight_dropped', 'core/policies.py',
        'if correct==1: return Chosen(rows, weight)',
        'if correct==1: return Chosen(rows)',
        'policies fuzz'),
    Fault('weight_of_the_wrong_row', 'core/policies.py',
        'return Chosen(rows, prob[rows]**-correct if correct else None)',
        'return Chosen(rows, prob.roll(1)[rows]**-correct if correct else None)',
        'inclusion policies'),
    Fault('weight_upside_down', 'core/policies.py',
        'weight = torch.where(share>0, n*share, 1.)**-correct',
        'weight = torch.where(share>0, n*share, 1.)**correct',
        'prioritized policies'),
    Fault('gradient_weighed_twice', 'core/item_loss.py',
        't.register_hook(lambda grad: grad*by_row.to(grad))',
        't.register_hook(lambda grad: grad*by_row.square().to(grad))',
        'policies laws matrix steps'),
    Fault('weights_of_other_items', 'callback/plan.py',
        'weights_of_items(idxs[rows], of_rows, len(tracker.memory))',
        'weights_of_items(rows, of_rows, len(tracker.memory))',
        'inclusion matrix loaders'),
    Fault('weight_of_another_batch', 'callback/loaders.py',
        'None if self.weights is None else self.weights[idx], i)',
        'None if self.weights is None else self.weights[idx.flip(0)], i)',
        'loaders inclusion matrix'),
    Fault('one_pass_forgets_the_share', 'callback/batch.py',
        'share = 1. if is_sum else n/max(1, len(rows))',
        'share = 1.',
        'steps'),
    # draws
    Fault('seed_ignored', 'core/policies.py',
        'seed = torch.initial_seed() if self.seed is None else self.seed',
        'seed = torch.initial_seed()',
        'policies callback chosen'),
    Fault('draws_not_restored', 'core/policies.py',
        "self._generator,self._saved = None,state['state']",
        'self._generator,self._saved = None,None',
        'policies chosen callback saving'),
    # items of batches
    Fault('waiting_taken_from_the_end', 'core/batches.py',
        'items = items.take(slice(0, self.bs))',
        'items = items.take(slice(len(items)-self.bs, None))',
        'pull matrix'),
    Fault('drops_what_waits', 'core/steps.py',
        'while waiting.must_step(True): yield _popped(waiting, i)',
        'pass',
        'pull chosen laws'),
    Fault('last_batch_lost', 'core/batches.py',
        'if exhausted: return -self.lowest(-len(self))>0',
        'if exhausted: return False',
        'pull laws matrix'),
    Fault('filled_up_with_the_easiest', 'core/batches.py',
        'return self.last.take(hardness.argsort(descending=True, stable=True)[:n].sort().values)',
        'return self.last.take(hardness.masked_fill(~is_left, math.inf).argsort(stable=True)[:n].sort().values)',
        'pull matrix'),
    Fault('indices_joined_in_turn', 'core/batches.py',
        'idx = torch.cat([self.idx, other.idx])',
        'idx = torch.cat([other.idx, self.idx])',
        'pull matrix loaders'),
    Fault('row_shifted', 'core/batches.py',
        'idx = None if self.idx is None else self.idx[rows]',
        'idx = None if self.idx is None else self.idx.roll(1)[rows]',
        'pull matrix remembered'),
    Fault('items_of_the_batch_before', 'callback/loaders.py',
        'rows = slice(i*self.size, (i+1)*self.size)',
        'rows = slice(max(0, i-1)*self.size, max(1, i)*self.size)',
        'loaders matrix'),
    Fault('drop_last_forgotten', 'callback/plan.py',
        'if drop_last and n_ranks==1 and len(rows)>=bs and not is_full_epoch:',
        'if False:',
        'inclusion loaders callback'),
    Fault('reads_what_another_rank_does', 'callback/loaders.py',
        'self._of_this_rank(idxs) if self._is_shared else idxs',
        'self._of_this_rank(idxs).roll(1) if self._is_shared else idxs',
        'loaders'),
    # losses
    Fault('ignored_pixels_count', 'core/losses.py',
        'return losses.sum(1) / counts.sum(1).clamp(min=1)',
        'return losses.mean(1)',
        'losses fuzz matrix'),
    Fault('loss_of_the_wrong_row', 'core/losses.py',
        'return losses.reshape(n, -1)',
        'return losses.reshape(-1, n).t()',
        'losses fuzz matrix'),
    Fault('reduction_not_restored', 'core/losses.py',
        'finally: owner.reduction = before',
        'finally: pass',
        'losses bad_days'),
    Fault('a_loss_that_mixes_items', 'core/first_batch.py',
        '    if are_rows and all(_are_shares(a, b, counts, tol) for a,b in others): return',
        '    return',
        'losses bad_days what_trains'),
    # the scoring pass
    Fault('scores_in_training_mode', 'core/untouched.py',
        "for attributes,_ in flags: attributes['training'] = False",
        'for attributes,_ in flags: pass',
        'scoring laws matrix'),
    Fault('scores_with_gradients', 'core/untouched.py',
        'with torch.no_grad(),fixed_random(): yield model',
        'with torch.enable_grad(),fixed_random(): yield model',
        'scoring laws'),
    Fault('scoring_draws', 'core/untouched.py',
        'with torch.no_grad(),fixed_random(): yield model',
        'with torch.no_grad(): yield model',
        'scoring laws'),
    Fault('batchnorm_left_in_evaluation', 'core/untouched.py',
        "for attributes,is_training in flags: attributes['training'] = is_training",
        "for attributes,is_training in flags: attributes['training'] = False",
        'scoring laws'),
    Fault('buffers_left_changed', 'core/untouched.py',
        'if b.shape==value.shape: b.data.copy_(value)',
        'if b.shape==value.shape: pass',
        'scoring looks traces'),
    Fault('what_is_left_behind_not_seen', 'core/first_batch.py',
        'changed = [str(name) for i,name in {**before, **after} if before.get((i,name))!=after.get((i,name))]',
        'changed = []',
        'traces what_trains'),
    Fault('shares_believed', 'core/item_loss.py',
        'return n<=8 or n&(n-1)==0',
        'return False',
        'what_trains scoring'),
    Fault('state_in_its_own_order', 'callback/items.py',
        "torch.from_numpy(_told_apart(saved['keys']).get_indexer(_told_apart(now['keys'])))",
        "torch.arange(len(now['keys'])).clamp(max=len(saved['keys'])-1)",
        'items other_items'),
    Fault('relabelled_item_goes_on', 'callback/items.py',
        "normalize('NFC', '\\0'.join(o))",
        "normalize('NFC', o[0])",
        'items other_items'),
    Fault('copies_are_items', 'callback/items.py',
        "return by,rows if by=='row' else np.arange(len(self))",
        'return by,np.arange(len(self))',
        'items corrections'),
    Fault('correction_a_row_off', 'clean/corrections.py',
        'for column,cell in zip(at, cells): table.iat[row,column] = cell',
        'for column,cell in zip(at, cells): table.iat[row-1,column] = cell',
        'corrections suspects'),
    Fault('another_batch_is_noted', 'core/watch.py',
        'self.n_new==1 or _has_part(batch, y)',
        'True',
        'watch'),
    Fault('epochs_run_into_each_other', 'core/watch.py',
        'if self._has_noted: self.end_epoch()',
        'pass',
        'watch'),
    Fault('epoch_of_unknown_accuracy', 'core/watch.py',
        'tracker.weigh_epoch(accuracy)',
        'tracker.weigh_epoch(None)',
        'watch'),
    Fault('surest_labels_first', 'core/labels.py',
        'self.margin.argsort(stable=True)',
        'self.margin.argsort(stable=True, descending=True)',
        'watch suspects watching'),
    Fault('menus_by_margin', 'clean/corrections.py',
        'is_preset = known.is_estimated_error.to_numpy() & (found.margin<0).to_numpy()',
        'is_preset = (found.margin<0).to_numpy()',
        'suspects'),
    Fault('looks_of_other_validation_items', 'callback/notes.py',
        'idx = known_of(learn.dl).idx\n            pred',
        'idx = known_of(learn.dl).idx.flip(0)\n            pred',
        'items watching'),
    Fault('copy_a_step_late', 'core/ahead.py',
        'if (n_read-self.n)%self.every==0: passes.follow()',
        'if (n_read-self.n)%self.every==1: passes.follow()',
        'ahead'),
    Fault('ahead_out_of_turn', 'core/ahead.py',
        'batch,job = waiting.popleft()',
        'batch,job = waiting.pop()',
        'ahead chosen'),
    # what the first batch is asked
    Fault('rows_moved_believed', 'core/first_batch.py',
        'return bool((is_anywhere & (a!=b)).any())',
        'return False',
        'first_batch'),
    Fault('collates_believed', 'core/first_batch.py',
        'if first_stays and not (tells and all_stay): return',
        'return',
        'first_batch'),
    Fault('another_loss_believed', 'core/first_batch.py',
        'if any(_factor(a, b, tol, by_row=True) is not None for a,b in pairs): return True',
        'return True',
        'first_batch'),
    Fault('rows_by_their_place_believed', 'core/first_batch.py',
        'if self.n<4: return # one row is a case of its own',
        'return',
        'first_batch'),
    Fault('other_items_believed', 'core/first_batch.py',
        'elif has_input.any() and not (has_input | has_target).all()',
        'elif False',
        'first_batch'),
    Fault('other_kind_in_evaluation_believed', 'core/first_batch.py',
        'if torch.allclose(end(a), b, 1e-3, 1e-5): return name',
        'if False: return name',
        'first_batch'),
    # what is remembered
    Fault('flipped_rows_are_others', 'core/memory.py',
        'fewest = max(.5*by_chance, by_chance-.25)*is_compared.sum()',
        'fewest = .5*by_chance*is_compared.sum()',
        'first_batch'),
    Fault('units_are_mixed', 'callback/notes.py',
        'if not self.has_asked: self.ask_again()',
        'self.has_asked = True',
        'first_batch'),
    Fault('other_kinds_are_listed', 'callback/notes.py',
        'if not self.is_of_kind: self.check_kind(pred)',
        'self.is_of_kind = True',
        'first_batch'),
    Fault('rows_are_repeated', 'callback/batch.py',
        'check_size(batch, len(batch))',
        'pass',
        'first_batch'),
    Fault('packed_rows_wait', 'callback/first_batch.py',
        'if is_first and self.learn.selection.gathers: looks.ask_order()',
        'pass',
        'first_batch'),
    Fault('smoothed_the_wrong_way', 'core/memory.py',
        'torch.lerp(losses, past, self.ema)',
        'torch.lerp(past, losses, self.ema)',
        'memory remembered inclusion'),
    Fault('rest_not_counted', 'core/memory.py',
        'self.rested += 1',
        'pass',
        'memory inclusion'),
    Fault('rests_an_epoch_more', 'core/memory.py',
        '(self.rested[idxs]>max_rest)',
        '(self.rested[idxs]>max_rest+1)',
        'inclusion'),
    Fault('epoch_counted_twice', 'callback/selection.py',
        'self.epochs_done += 1',
        'self.epochs_done += 2',
        'callback policies early'),
    Fault('scored_an_epoch_late', 'methods/stale_loss.py',
        'self.epochs_since_scored<self.n',
        'self.epochs_since_scored<=self.n',
        'methods matrix'),
    Fault('early_loss_an_epoch_late', 'core/memory.py',
        'elif after>=1: is_time = self.epochs>=after',
        'elif after>=1: is_time = self.epochs>after',
        'early'),
    Fault('early_losses_go_on', 'core/memory.py',
        'if self.loss is not None or not losses.isfinite().any(): return False',
        'if not losses.isfinite().any(): return False',
        'early head'),
    # the last layer
    Fault('weighed_by_ease', 'clean/refit.py',
        'loss = selection.early.loss.nan_to_num(0, 0, 0).clamp(min=0)',
        'loss = 1/selection.early.loss.nan_to_num(0, 0, 0).clamp(min=1e-3)',
        'head'),
    Fault('refitted_against_the_rule', 'clean/refit.py',
        'is_taken = strength is not None or not doubt',
        'is_taken = True',
        'head'),
    Fault('refitted_at_the_first_strength', 'clean/refit.py',
        'if not doubt: break',
        'break',
        'head'),
    Fault('features_of_other_items', 'clean/refit.py',
        "weight = weight.to(self.x.device)[self.idx.to(self.x.device)]",
        "weight = weight.to(self.x.device)[self.idx.flip(0).to(self.x.device)]",
        'head'),
    Fault('state_not_restored', 'callback/selection.py',
        "self.epochs_done = state['epochs_done']",
        'pass',
        'methods saving callback'),
    # schedules
    Fault('warmup_an_epoch_longer', 'core/schedules.py',
        'return epochs>=self.warmup and',
        'return epochs>self.warmup and',
        'callback policies matrix'),
    Fault('schedule_a_step_late', 'callback/batch.py',
        'missing = n-self.loader.n_handed+self.overcount',
        'missing = max(0, n-1)-self.loader.n_handed+self.overcount',
        'matrix pull laws'),
    Fault('prunes_to_the_end', 'methods/info_batch.py',
        'if now.ends_by(self.delta): return super()',
        'if True: return super()',
        'methods inclusion matrix'),
    # labels
    Fault('margin_sign', 'core/labels.py',
        'margin = (own-largest).clamp(-_most, _most)',
        'margin = (largest-own).clamp(-_most, _most)',
        'watching suspects'),
    Fault('prior_upside_down', 'core/labels.py',
        'return _told(logits, odds, odds-_prior(given, before).log(), y, counts, given)',
        'return _told(logits, odds, odds+_prior(given, before).log(), y, counts, given)',
        'watching suspects'),
    Fault('balanced_by_more_than_the_root', 'core/labels.py',
        'balanced = logits-_prior(predicted, before).log()/2',
        'balanced = logits-_prior(predicted, before).log()',
        'watching suspects'),
    Fault('class_weight_left_out', 'core/labels.py',
        'odds = logits-torch.where(self.weights>0, self.weights, 1.).log()',
        'odds = logits',
        'watching suspects'),
    Fault('suspects_row_shifted', 'core/labels.py',
        'return self.margin.argsort(stable=True)[:int((self.looks>0).sum())]',
        'return (self.margin.argsort(stable=True)[:int((self.looks>0).sum())]+1)%len(self)',
        'watching suspects'),
    Fault('suspects_turned_round', 'core/labels.py',
        'return self.margin.argsort(stable=True)[:int((self.looks>0).sum())]',
        'return self.margin.argsort(stable=True)[:int((self.looks>0).sum())].flip(0)',
        'watching suspects'),
    Fault('one_look_more_counts_once', 'core/labels.py',
        'found.end_epoch(found.transitions.valid, times=3)',
        'found.end_epoch(found.transitions.valid)',
        'watching'),
    Fault('offsets_turned_round', 'core/labels.py',
        'own,largest,_ = _own_and_other(logits-self._offsets(i, c), c)',
        'own,largest,_ = _own_and_other(logits+self._offsets(i, c), c)',
        'watching suspects'),
    Fault('epochs_weigh_alike', 'core/labels.py',
        'return (knows*knows+.01)*(-6*by_heart).exp(),(1-3*knows).clamp(min=.15)',
        'return torch.ones_like(knows),(1-3*knows).clamp(min=.15)',
        'watching suspects'),
    Fault('validation_not_heard', 'callback/notes.py',
        'self.train.weigh_epoch(hits/looks.clamp(min=1))',
        'pass',
        'watching suspects'),
    # labels by a network as it is
    Fault('told_by_itself', 'clean/features.py',
        'model.fit(x[learned], labels[learned])',
        'model.fit(x, labels)',
        'features'),
    Fault('groups_in_several_folds', 'clean/features.py',
        '    return [*split.split(labels, labels, groups)]',
        '    return [*split.split(labels, labels, np.arange(len(labels)))]',
        'features'),
    Fault('copies_of_the_other_part', 'clean/features.py',
        'pairs += [tuple(starts[part]+i for part,i in pair) for pair in zip(*sides)]',
        'pairs += [tuple(i for part,i in pair) for pair in zip(*sides)]',
        'features'),
    Fault('sure_by_all_labels', 'clean/features.py',
        'np.nanmean(probs[labels==i,i])',
        'np.nanmean(probs[:,i])',
        'features'),
    Fault('norms_of_a_batch', 'clean/reading.py',
        'model = body.model.to(device, memory_format=torch.channels_last).eval()',
        'model = body.model.to(device, memory_format=torch.channels_last)',
        'reading'),
    Fault('mirrors_mirror_nothing', 'clean/reading.py',
        'model(x.flip(-1))',
        'model(x)',
        'reading'),
    Fault('in_the_order_of_reading', 'clean/reading.py',
        'return read,every.at([at[keys[i]] for i in read])',
        'return read,every',
        'reading'),
    Fault('kept_of_another_size', 'clean/reading.py',
        "if state.get('named')==named else",
        "if state.get('named') else",
        'doctor'),
    # answers, and the folder that is made of them
    Fault('one_of_two_labels', 'clean/answers.py',
        '        if first!=said:',
        '        if first.answer!=said.answer:',
        'answers'),
    Fault('unsure_is_kept', 'clean/answers.py',
        "if o.answer in ('unsure','delete')}",
        "if o.answer=='delete'}",
        'answers'),
    Fault('class_in_place_of_the_part', 'clean/answers.py',
        'parts[bool(images.parts)] = labels[f]',
        'parts[0] = labels[f]',
        'answers'),
    Fault('taken_in_small_letters', 'clean/answers.py',
        'while str(free).lower() in taken:',
        'while str(free) in taken:',
        'answers'),
    Fault('links_lead_into_the_data', 'clean/answers.py',
        'data = {images.folder.resolve(), *(f.parent.resolve() for f in images.files)}',
        'data = {images.folder.resolve()}',
        'answers'),
    Fault('half_a_folder', 'clean/answers.py',
        'new = Path(beside)/to.name',
        'new = to.with_name(to.name)',
        'answers'),
    # what is reported
    Fault('kept_is_seen', 'callback/report.py',
        "samp_perc = _ratio(df.kept.sum(), df.seen.sum())",
        "samp_perc = _ratio(df.seen.sum(), df.seen.sum())",
        'callback'),
]

def made(fault, folder):
    "Make a fault in a copy of the package; gives the file and what it was"
    file = folder/'selback'/fault.file
    code = file.read_text()
    n = code.count(fault.line)
    if n!=1: raise ValueError(f'{fault.name}: got {fault.line!r} {n} times in {fault.file}, wanted it once.')
    file.write_text(code.replace(fault.line, fault.becomes))
    return file,code

def first_failure(output):
    "The first case that failed, as pytest names it; None: none did"
    found = re.search(r'^(?:FAILED|ERROR) (\S+)', output, flags=re.M)
    return found and found[1].removeprefix('tests/')

def run_tests(folder, tests):
    "The first of the fast cases of some files that fails in a copy, or None"
    files = [f'tests/test_{name}.py' for name in tests.split()]
    options = '-x', '-q', '-rfE', '--tb=no', '-m', 'not slow', '-p', 'no:cacheprovider'
    command = [sys.executable, '-m', 'pytest', *options]
    done = subprocess.run([*command, *files], cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode==0: return None
    case = first_failure(done.stdout)
    if case is None or done.returncode not in (1, 2): raise RuntimeError(done.stdout[-2000:]+done.stderr[-2000:])
    return case

def caught(fault, folder):
    "The case that catches a fault"
    file,code = made(fault, folder)
    try: return run_tests(folder, fault.tests)
    finally: file.write_text(code)

def copy_of_the_checkout(folder):
    for name in COPIED:
        source = root/name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder/name)
    found = subprocess.run([sys.executable, '-c', 'import selback; print(selback.__file__)'], cwd=folder,
        capture_output=True, text=True, check=True).stdout.strip()
    if not found.startswith(str(folder)): raise RuntimeError(f'imported: got {found}, wanted one in {folder}')
    return folder

def check_sound(faults, folder):
    "Raise a `RuntimeError` if one of their files fails where there is no fault"
    case = run_tests(folder, ' '.join(sorted({name for fault in faults for name in fault.tests.split()})))
    if case: raise RuntimeError(f'{case} fails without a fault.')

def run_all(faults, n_copies=2):
    "Pairs: a fault, and the case that catches it"
    with tempfile.TemporaryDirectory() as out:
        copies = Queue()
        folders = [copy_of_the_checkout(Path(out).resolve()/str(n)) for n in range(n_copies)]
        check_sound(faults, folders[0])
        for folder in folders: copies.put(folder)
        def in_a_copy(fault):
            folder = copies.get()
            try: return fault,caught(fault, folder)
            finally: copies.put(folder)
        with ThreadPoolExecutor(n_copies) as pool: yield from pool.map(in_a_copy, faults)

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', help='of some faults; all without any')
    parser.add_argument('--out', help='a file for the table: fault, file, case')
    args = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    if unknown := set(args.names)-known.keys(): parser.error(f'no such fault: {", ".join(sorted(unknown))}')

    rows,missed = [],0
    for fault,case in run_all([known[name] for name in args.names] or FAULTS):
        print(f'{fault.name:32} {case or "NOT CAUGHT"}', flush=True)
        rows.append(f'{fault.name},{fault.file},"{case or ""}"')
        missed += case is None
    print(f'{len(rows)-missed} of {len(rows)} faults were caught')
    if args.out: Path(args.out).write_text('\n'.join(['fault,file,case', *rows])+'\n')
    sys.exit(missed>0)

if __name__=='__main__': main()
