"""The fault matrix: what may go wrong, and what must come of it, a row each.

A test carries its row by `@row(15)`; `python -m tests.faults` runs them all and prints the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ssl_kd.guard.faults import Stage

row = pytest.mark.fault
"""`@row(15)` on a test, or `@row(4, 5)` where it injects more than one row's fault."""

KINDS = [stage for stage in Stage if stage.kind.reason]
"""The kinds of faults that the guard knows; the others are what it did."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        fault: what is injected.
        outcome: the right behaviour.
        how: how it is injected, where that is not obvious.
        later: why it is not tested yet; empty where it is.
        kinds: of the guard's table of faults, which it shows.
    """

    fault: str
    outcome: str
    how: str = ""
    later: str = ""
    kinds: tuple[Stage, ...] = ()


GROUPS = {
    1: "data and store",
    15: "forward and loss",
    28: "backward and optimizer",
    39: "checkpoint, process, system",
    48: "user, configuration, security",
    54: "language models",
    80: "guarded loops of one's own",
    86: "what is read",
    96: "commands and folders",
    101: "several processes",
    112: "teachers elsewhere, and the student's own text",
    127: "what people do with a run; images and text",
    143: "what testers found: chats, keys, caches, pages, names, flags",
}
"""First row of each group -> its name."""

ROWS = {
    1: Row(
        "one cached row is NaN, with or without a fitting checksum",
        "named (file, row, sample) on open; excluded only if asked, else an error",
    ),
    2: Row("one cached row is inf, or finite but 1e30", 'the same, as "out of range"'),
    3: Row("an all-zero embedding", "normalises to zero without NaN; counted"),
    4: Row(
        "one flipped bit in a shard",
        "a checksum error names the shard; --rebuild_damaged rebuilds that shard alone",
    ),
    5: Row("a truncated shard, an empty file, a file of random bytes", "the same"),
    6: Row(
        "a cache of another teacher, transform, dtype or data set",
        "the mismatch says which field; recomputed only on request",
    ),
    7: Row(
        "killed (-9) while writing a shard, at 20 random moments",
        "every complete shard is kept; the next run resumes; the result is identical",
        how="20 real kills of forked writers",
    ),
    8: Row(
        "the disk is full while writing",
        "a clear error; the old cache is still readable; no temporary file is left",
        how="a real limit on file size (EFBIG); a full 1 MiB tmpfs (ENOSPC) where one can be had",
    ),
    9: Row(
        "an unreadable image; a 1x1, grey, RGBA, CMYK, 16-bit or animated one",
        "decoded right, or named and listed; never a crash of the whole extraction",
    ),
    10: Row(
        "fewer samples than a batch, than k neighbours, than clusters; one sample; none",
        "works, or says what is needed",
    ),
    11: Row(
        "labels absent, partly absent, strings, or not contiguous",
        "training works; metrics that need labels say so",
    ),
    12: Row("a pickle with code in place of a cache or checkpoint", "refused; nothing executed"),
    13: Row("two processes write the same cache", "one fails clearly; no mixture"),
    14: Row(
        "duplicates of one image in the data",
        "neighbours exclude the sample itself, not its duplicates; no NaN",
    ),
    15: Row(
        "NaN in one head's weight",
        "that head cut out and restored; the others bit-identical",
        kinds=(Stage.LOSS, Stage.TEACHER, Stage.WEIGHT),
    ),
    16: Row("inf in one head's logits", "the same"),
    17: Row(
        "NaN in one sample's embedding at run time",
        "the sample is named; the batch goes on without it",
        kinds=(Stage.INPUT,),
    ),
    18: Row(
        "logits of 1e4 and 6e4 of either sign, fp16 overflow",
        "loss and gradient finite, within 2e-3 of float64",
    ),
    19: Row(
        "student and teacher probabilities disjoint (underflow)",
        "finite loss; gradient neither zero nor NaN",
    ),
    20: Row(
        "a cluster's running marginal reaches exactly 0",
        "finite; the smoothing says so once",
        kinds=(Stage.MARGINAL,),
    ),
    21: Row("all mass on one cluster (collapse)", "no NaN; the report flags collapse per head"),
    22: Row(
        "all instance weights zero, or one NaN among them",
        "uniform; or: that one 0, the others keep their proportions",
    ),
    23: Row(
        "temperature 0, negative, 1e-9, 1e9, NaN",
        "refused with the allowed range; the edge of the range is finite",
    ),
    24: Row(
        "beta 0, negative, above 1, NaN; clip_min infinite or NaN",
        "the same; beta = 1 is the valid edge",
    ),
    25: Row(
        "token distillation: all labels masked, NaN under the mask, infinities, other padding, "
        "logits filtered by top-k or top-p",
        "zero loss on the graph; ignored; dropped or saturated; common vocabulary; each token by "
        "its own support, whatever stands beside it",
    ),
    26: Row(
        "kd term NaN, ce finite",
        "ce alone trains on that step; rows and tensor named; counted; after N in a row, why",
        kinds=(Stage.LOSS,),
    ),
    27: Row("both terms NaN", "the step is skipped, its rows named; every bit as before"),
    28: Row(
        "finite loss, NaN gradient in one head",
        "that head skipped; the others bit-identical",
        kinds=(Stage.GRADIENT,),
    ),
    29: Row(
        "gradient norm 1e20 (its square overflows) in one head",
        "too large: clipped or skipped for that head alone",
    ),
    30: Row(
        "gradient spike of 1000x the running norm",
        "skipped and counted; the running norm is not polluted",
        kinds=(Stage.SPIKE,),
    ),
    31: Row(
        "gradient exactly zero for 100 steps in one head",
        "reported as dead",
        kinds=(Stage.DEAD,),
    ),
    32: Row(
        "a skipped head under AdamW with momentum and decay",
        "weights, both moments, step count and EMA unchanged to the bit",
    ),
    33: Row(
        "10 bad steps in a row in one head", "restored from its last good state; event written"
    ),
    34: Row(
        "a head bad on every step", "re-initialised once, then retired; the run goes on and says so"
    ),
    35: Row(
        "every head bad for N steps",
        "stops with a diagnosis, a checkpoint of the last good state, exit code 3",
    ),
    36: Row(
        "loss scale driven down by one sick part",
        "the scale of the healthy ones does not move; a floor holds",
        kinds=(Stage.OVERFLOW,),
    ),
    37: Row(
        "fp16 parameters handed to the trainer",
        "promoted to fp32 masters with one line, or refused",
    ),
    38: Row(
        "a learning rate of 10",
        "trains on, or stops as in row 35; never writes a non-finite checkpoint",
    ),
    39: Row(
        "killed (-9) at 20 random moments in training",
        "resumes; final weights bit-identical to the uninterrupted run",
        how="20 real kills of forked runs",
    ),
    40: Row("SIGTERM, Ctrl-C", "checkpoint written, exit code says so, resume continues"),
    41: Row(
        "a truncated or bit-flipped checkpoint", "falls back to the previous good one, says so"
    ),
    42: Row(
        "resume with other settings",
        "says which differ; refuses what changes the result",
    ),
    43: Row(
        "a checkpoint of an older version of the library",
        "loads, or names the version that can",
    ),
    44: Row(
        "out of memory in a step",
        "the message gives the setting to lower; nothing half-written",
        how="more than the address space is asked of the real allocator",
    ),
    45: Row(
        "the run folder is not writable, or already holds another run",
        "a clear error before any work is done",
    ),
    46: Row(
        "one rank sees a NaN or inf (loss term, all terms, gradient, weight), the others do not",
        "every rank takes the same decision and names that rank; weights bit-identical; no hang",
        how="2 and 4 processes with gloo and DDP; without the guard the same loop hangs",
    ),
    47: Row(
        "one rank is killed",
        "the others end with an error inside a minute; resume works",
        how="kill -9 of one of 2 processes",
    ),
    48: Row(
        "a misspelt, mistyped or out-of-range setting in config.py or on the command line",
        "says which, what is allowed, the nearest name",
    ),
    49: Row(
        "fp16 on a CPU, bf16 on a P100, a GPU the torch build has no kernels for",
        "says what will be used instead and why, or refuses with the way out",
        how="GPUs are described to the policy, the CPU is real",
    ),
    50: Row(
        "teacher weights cannot be downloaded",
        "one line with the three ways to go on; no stack trace; nothing half-written",
        how="every connection of the process is refused",
    ),
    51: Row(
        "teacher and student with different tokenizers in same-tokenizer mode",
        "says so and names the modes to use; a vocabulary that is only padded is the same",
    ),
    52: Row(
        "a file name with spaces, unicode, .., or a symlink out of the data folder",
        "handled; never writes outside its folder",
    ),
    53: Row(
        "the old clamps whose gradient is identically zero",
        "refused with the lowest perplexity they allow",
    ),
    54: Row(
        "NaN in one layer's gate logits, or in the gradient of the router",
        "the router untouched to the bit; kd cut out where the teacher's output is NaN; ce trains",
        how="a gate's weight or input is patched, in native, all, ka and sar",
    ),
    55: Row(
        "NaN in one expert of the teacher",
        "the expert is named, kd cut out; tokens not routed to it keep every bit",
    ),
    56: Row(
        "NaN in one alignment group",
        "kd cut out, ce trains; outside every group the teacher's output has no effect",
    ),
    57: Row(
        "logits that are capped or scaled, on either side, across tokenizers",
        "followed by uld and chunks; refused by hidden, which names these",
    ),
    58: Row(
        "no finite term for ten steps in a row",
        "the run ends with cause, settings to try and exit code 3, the student at its last good "
        "state; in ultra_stable it goes on from there with a fresh optimizer",
    ),
    59: Row(
        "logits that overflow float16 under autocast",
        "loss and gradient finite, within 2e-3 of float64; no step lost",
        how="float16 is emulated on the CPU",
    ),
    60: Row(
        "a teacher's cache of another teacher, tokenizer, text, block size, packing or temperature",
        "refused with the field that differs; the cache is left as it is",
    ),
    61: Row(
        "a NaN, a flipped bit or a cut in a file of the teacher's cache",
        "the file and the row are named before any work",
    ),
    62: Row(
        "a model's folder with weights cut, damaged or missing, without configuration or tokenizer",
        "the folder, and the tensor that is missing, are named before any work",
    ),
    63: Row("adapters whose base is gone, or is not named", "the base, or the field, is named"),
    64: Row(
        "a line of .jsonl that is not JSON, not an example or empty; messages without a chat "
        "template",
        "named by file and line; the others train as if it were absent, or the way out is named",
    ),
    65: Row(
        "killed (-9) while writing the teacher's cache, at random moments",
        "every complete file is kept; the cache is bit-identical to one never interrupted",
        how="8 real kills of forked writers",
    ),
    66: Row(
        "a language run is stopped, or killed (-9) at random moments",
        "resumed, student, log, table and router are bit-identical to an uninterrupted run's",
        how="ten kinds of run; 8 real kills of forked runs",
    ),
    67: Row(
        "a student that is NaN only when it writes",
        "the questions are named and count as not answered; the others and perplexity unchanged",
    ),
    68: Row(
        "an evaluation batch that is NaN",
        "named, left out and counted; the scores are exactly those of the others",
    ),
    69: Row(
        "a router that only imitates the student",
        "stopped by an event that says how far it drifted; the student trains on",
        kinds=(Stage.DRIFT,),
    ),
    70: Row(
        "a router file of another teacher, with a NaN in it, truncated, or missing",
        "refused with the file and what differs",
    ),
    71: Row(
        "a dense teacher where experts are asked for; a router set to learn from a cache or across "
        "tokenizers",
        "refused with the settings that do not fit and the way out",
    ),
    72: Row(
        "a student's step goes wrong: by a weight of its own, of the teacher, in a gradient",
        "recorded with the weights that it began with; replayed, it names the same operation, "
        "cause and rows",
        kinds=(Stage.LOSS, Stage.GRADIENT),
    ),
    73: Row(
        "a recorded step whose text or teacher has changed since, or whose bundle is cut",
        "refused with the file and what differs",
    ),
    74: Row(
        "a teacher whose output is not finite: NaN in a weight, whatever the weights of the terms",
        "refused before step 0 with the weight named and exit code 2; no run is left",
    ),
    75: Row(
        "a teacher that overflows in float16 alone",
        "runs in bfloat16 or float32, with the reason on the screen and in config.json",
        how="float16 is emulated on the CPU",
    ),
    76: Row(
        "a student that is not finite before step 0, with any number of steps and in a dry run",
        "refused with the weight named and exit code 2; weights that are not finite are not saved",
    ),
    77: Row(
        "a loss term that is asked for and cut out of STOP_AFTER steps in a row",
        "the run ends with cause and exit code 3; where it goes on, the steps are counted, and a "
        "term of weight 0 saves none",
    ),
    78: Row(
        "the disk is full at the last checkpoint",
        "a warning; what was trained is saved and the run ends well",
    ),
    79: Row(
        "adapters whose base is their own folder, or adapters of it",
        "refused with both folders named",
    ),
    80: Row(
        "a bad batch of one part, or of one guard, runs through normalisation that others use",
        "its running statistics are put back, by name; what is healthy trains on",
        how="a trunk that two parts share; the discriminator of a GAN; a variance that overflows",
        kinds=(Stage.BUFFER,),
    ),
    81: Row(
        "a caller in autocast, no_grad or inference_mode, with another default dtype or device",
        "the same weights and answers to the bit; the caller's mode is as it was",
    ),
    82: Row(
        "a saved model with a NaN or an infinity in its weights, votes or projection",
        "refused when it is loaded, with the folder and the tensor",
    ),
    83: Row(
        "a head of one's own that ends the process, cannot be built or gives no logits of "
        "clusters; heads that do not fit into memory",
        "refused in one line, exit code 2, with the class and the place, or the settings to lower",
    ),
    84: Row(
        "a head or a loss of one's own edited between stop and resume",
        "refused with the file; a run with the old one goes on",
    ),
    85: Row(
        "finite embeddings far larger than the others, zero, all alike or far off one way; "
        "a test set that is the training set",
        "said before training, with the number and the first row where there is one",
    ),
    86: Row(
        "a config.json or a recorded step names a class of somebody else as its head or loss",
        "nothing is imported; the message names the class, and how to name it oneself",
        how="a module beside config.json that leaves a trace",
    ),
    87: Row(
        "PostScript, or another format that PIL hands to a program, called photo.jpg",
        "named and left out; no program is started",
    ),
    88: Row(
        "an image of a few kilobytes that takes gigabytes once it is decoded",
        "named and left out before it is decoded",
        how="a 16-bit PNG of zeros, above a lowered limit",
    ),
    89: Row(
        "a row of a large file, or a language model's weights under any name, replaced since",
        "the cache is refused: every byte counts, as do the files that an index names",
    ),
    90: Row(
        "parquet of a shuffled data frame, with columns that are no numbers; labels of -1 and 1",
        "its index is no feature, what is left out is named; two classes, and all are scored",
    ),
    91: Row(
        "a folder that may not be listed; a file that was gone for a moment",
        "named, counted and shown at each run; once it is back, --rebuild_damaged embeds it",
        how="permission refused to this process; the shard that lacks the sample is rebuilt",
    ),
    92: Row(
        "a cache's manifest that lacks a field, or holds one of another version",
        "its file and the field are named; --force-recompute rebuilds the cache",
    ),
    93: Row(
        "a model's config.json or model.safetensors that is cut, or of another model",
        "the file is named, by the estimator, the model and a teacher of timm's",
    ),
    94: Row(
        "a file name with line breaks and a terminal's control sequences",
        "escaped wherever it is shown: it forges no line of the log",
    ),
    95: Row(
        "a teacher that fails at one image: it runs out of memory, or has a bug",
        "one line names the image, or the first and last of its batch; nothing is half written",
    ),
    96: Row(
        "several ranks of a launcher that says not where to meet, or of work for one process",
        "refused with the rank, in a line from each, before anything is written",
    ),
    97: Row(
        "a run folder that cannot be: RUNS_DIR is a file, RUN_NAME has a NUL or is too long, the "
        "working folder is gone",
        "the setting, or the folder, is named; exit code 2, nothing is written",
    ),
    98: Row(
        "bytes that are no line of a log at the end of metrics.jsonl of a stopped run",
        "removed and counted in the log; resumed, weights and log are those of an undisturbed run",
    ),
    99: Row(
        "a gradient norm above a fixed threshold (Thresholds.max_norm, --grad_norm_threshold)",
        "that step is skipped and counted, every bit as before; the running norm does not move",
        kinds=(Stage.LARGE,),
    ),
    100: Row(
        "a settings file that calls sys.exit, is a folder, a broken link, UTF-16 or nested too "
        "deeply",
        "named with its line or the reason; nothing of it is executed, nothing is written",
    ),
    101: Row(
        "one of the processes of train.py is killed, at any step or change of a file",
        "the others end within seconds with the reason; resumed by any number of processes, all "
        "that is left is that of an undisturbed run",
        how="kill -9 of a random one of 2 or 3 at 3 random moments, and at 20",
    ),
    102: Row(
        "SIGTERM, Ctrl-C or kill -9 reaches one of several processes, all, or torchrun",
        "all stop at one step with a checkpoint and a code that is not 0; resumed, the same bytes",
    ),
    103: Row(
        "heads of one of several processes are sick",
        "events, restored heads and the others' bits are those of one process; its bundle replays",
    ),
    104: Row(
        "too few healthy parts: heads counted over all processes; a term that stays sick on one",
        "all stop with the same reason and code; the last checkpoint is finite",
    ),
    105: Row(
        "more processes than heads, or than rows of a batch; work that ranks cannot share",
        "refused with one line that says how many, before anything is written",
    ),
    106: Row(
        "the first process fails before the training: there is no such data",
        "the others end with its reason and its code",
    ),
    107: Row(
        "a loss term is NaN on one rank that trains a language model, whole (DDP) or in pieces "
        "(FSDP2)",
        "all take the step without it, as one process does; the event names the rank",
    ),
    108: Row(
        "one of the ranks that train a language model dies",
        "the others end with what they waited for",
    ),
    109: Row(
        "one of the ranks that write a teacher's cache dies",
        "complete files stay, exactly the missing ones are computed; the bytes are those of one "
        "process",
    ),
    110: Row(
        "one of the tasks that share the embedding of a data set is killed",
        "no complete shard is lost or computed again; the bytes are those of one process",
        how="kill -9 of a task of a job array in the middle of a shard; 20 kills of writers",
    ),
    111: Row(
        "two tasks compute the same shard; a task is of another teacher or data set",
        "the first to store it counts; the other is refused and mixes nothing",
    ),
    112: Row(
        "a teacher's server is gone, dies in the middle of a run, or breaks off an answer",
        "asked again for five minutes, then one line; a resumed run ends with"
        " the same bits, a cache asks for the missing files alone",
    ),
    113: Row(
        "a teacher's server is slow or busy (429, 5xx)",
        "asked again, as late as it says; given up in one line",
    ),
    114: Row(
        "a teacher's server answers garbage, or numbers that cannot be: NaN, above 0, "
        "unsorted, too many, shifted",
        "refused at once in one line, with row and token; nothing of it is learned or kept",
    ),
    115: Row(
        "a teacher's server has another model or another tokenizer",
        "refused before the first step",
    ),
    116: Row(
        "a teacher's vocabulary is padded, or has tokens that the student's lacks",
        "padding takes no part; text with a token that one of them lacks is refused, the "
        "token named",
    ),
    117: Row(
        "a student writes nothing to learn from: it ends at once, or a whole step is empty",
        "the end is learned; a step without a token is skipped to the bit, with an event;"
        " a run of them stops",
    ),
    118: Row(
        "NaN while a student writes, or in the teacher's answer to that alone",
        "found at that position, cut out and explained; the text trains on; replayed",
    ),
    119: Row(
        "the disk is full while a teacher's cache grows",
        "named with the file; complete files stay, and a new start computes the missing "
        "ones to the same bytes",
    ),
    120: Row(
        "a cached output head is damaged, missing or another's",
        "named when the cache is opened; written again, alone",
    ),
    121: Row(
        "one of several teachers is NaN",
        "refused by name before step 0; in a step `kd` is cut out, the teacher named",
    ),
    122: Row(
        "a term of hidden states is NaN",
        "that term alone is cut out and explained; the step is as without it, to the bit",
    ),
    123: Row(
        "a NaN in the teacher's answer inside a transformers Trainer, on one process or two",
        "the step is that of cross-entropy alone, to the bit; for good: stopped",
    ),
    124: Row(
        "a table or packed file of text is cut off",
        "what stands before is used, the damage is named",
    ),
    125: Row(
        "the teacher's weights are gone, its cache is there",
        "trained from the cache alone, and said",
    ),
    126: Row(
        "a model brings Python code of its own",
        "not run; says what to set",
    ),
    127: Row(
        "`curation.jsonl` is cut off, edited, of another run, or names a cluster that is gone",
        "refused by its line; nothing is changed",
    ),
    128: Row(
        "several programs decide about one run at the same moment",
        "no line is lost",
    ),
    129: Row(
        "a decision is undone that later ones stand on",
        "refused; names the later one",
    ),
    130: Row(
        "the table of a finished run was sorted, cut or edited",
        "named; nothing is read by it",
    ),
    131: Row(
        "another site posts to the explorer, or asks for a file of the disk",
        "403 or 404; nothing is written or given",
    ),
    132: Row(
        "the map of a run is damaged",
        "computed again, and said",
    ),
    133: Row(
        "the disk fills, or a kill comes, during an export",
        "nothing half-written is left",
    ),
    134: Row(
        "pictures of a run are gone",
        "named and counted before anything is written; the rest goes on when asked",
    ),
    135: Row(
        "files are called with line breaks, `..`, control characters, or all the same",
        "harmless names, told apart; nothing outside the target is touched",
    ),
    136: Row(
        "the hub refuses a model, or cannot be reached",
        "one line with the way out; nothing is kept there",
    ),
    137: Row(
        "`names.json` is damaged, of another version, or calls two clusters the same",
        "named, with the way out",
    ),
    138: Row(
        "train and test were embedded by different teachers",
        "leaks are not looked for; both are named",
    ),
    139: Row(
        "an image of a record is missing, unreadable, or vanishes during the run",
        "the record is left out by name; where it vanishes, row and file are named",
    ),
    140: Row(
        "images changed since the run or the cache; student and teacher see them differently",
        "refused; names what differs",
    ),
    141: Row(
        "the teacher's answer to rows with images is NaN",
        "the step is that of cross-entropy alone, to the bit",
    ),
    142: Row(
        "every label of a batch is ignored, or a mask is empty: a mean over nothing",
        "skipped, and named as that",
    ),
    143: Row(
        "a chat template never shows the thoughts, calls or content that a turn holds",
        "the chat is left out by name; what a template hides of earlier turns by design is counted",
    ),
    144: Row(
        "a chat template shows turns of the assistant that cannot be located",
        "each is named and counted; above 1 % of the turns refused, with the way out",
    ),
    145: Row(
        "a teacher's server redirects, repeats the key, or the key cannot be sent; a proxy, .netrc",
        "the key goes to the host of TEACHER_URL alone, and into no message",
    ),
    146: Row(
        "a teacher's server drips its answer, or sends one without end, or a compressed bomb",
        "given up after two minutes as a whole; no more is read than what was asked for",
    ),
    147: Row(
        "TEACHER_URL cannot be an address, or holds a secret",
        "one line before anything is loaded; the secret is not shown",
    ),
    148: Row(
        "a teacher's cache with right checksums holds what cannot be: tokens beyond the"
        " vocabulary, masses above 1, rows of other blocks",
        "named on open (file, row, block), with the range that was expected",
    ),
    149: Row(
        "adapters are given a rank above the width of the model",
        "refused with the largest useful one, before a teacher is trained or loaded",
    ),
    150: Row(
        "a package that the run needs is not installed",
        "one line with the command that installs it, before torch and any folder",
    ),
    151: Row(
        "a batch size of one device (`per_device_train_batch_size`) is given to several processes",
        "BATCH_SIZE is that of all, recorded as such; resumed with others, both totals are named",
    ),
    152: Row(
        "the reader of the output leaves (`head -1`, a terminal that is gone)",
        "the run goes on to its report, with exit code 0",
    ),
    153: Row(
        "paths outside ASCII where Python reads names as ASCII (LC_ALL=C, PYTHONUTF8=0)",
        "as in a UTF-8 locale",
    ),
    154: Row(
        "a flag of TRL or transformers that means something else here, or nothing",
        "refused with the flag to use in its place, or why there is none",
    ),
    155: Row(
        "a visitor's file of decisions has a line that cannot be followed, or is no regular file",
        "refused by its line, whole; nothing is taken of it, and the run goes on",
    ),
    156: Row(
        "a page is written into a folder that is there, or fails on the way",
        "refused by name, and nothing in it is touched; nothing is left of a failure",
    ),
    157: Row(
        "another user of the machine asks the explorer",
        "403 and one line, without the address that was printed",
    ),
    158: Row(
        "a client sends lengths that are none, bodies that are too deep, or byte after byte",
        "refused before it is read; others are answered meanwhile",
    ),
    159: Row(
        "a writer was killed with its temporary file open",
        "the next start removes it, and no file that is alive or somebody else's",
    ),
    160: Row(
        "`runs/latest` points to another run while the first is being decided about",
        "decisions stay with the run that was opened",
    ),
    161: Row(
        "a loss term is not finite in one row of a batch, by the student's answer or the teacher's",
        "that row is left out of that term, by name; no bit of the others changes; after "
        "STOP_AFTER steps in a row, the run ends",
        kinds=(Stage.LOSS,),
    ),
    162: Row(
        "another thread draws random numbers while heads are fitted",
        "it draws what it draws without them",
    ),
    163: Row(
        "losses of 1e200 in float64; spikes among the first steps",
        "finite is finite; a spike is skipped from the second step on",
        kinds=(Stage.SPIKE, Stage.LARGE),
    ),
    164: Row("a guard around a TorchScript model", "works, or refused in one line"),
    165: Row(
        "a cache's manifest or shard with fitting checksums says what cannot be",
        "one line names the file and what is wrong; nothing is allocated for it",
    ),
    166: Row(
        "a file of tensors is a device, a pipe, a folder, or a zip larger inside than outside",
        "refused before anything is read",
    ),
    167: Row(
        "`--force-recompute` where the cache looks whole; a kill in between; several processes",
        "all is embedded anew and said so; the old cache stays until the new one is whole",
    ),
    168: Row(
        "an image that takes several times its size to decode",
        "strips, half the size, or refused: never more than 512 MiB",
    ),
    169: Row(
        "a saved model whose config.json or tensors are of another kind or out of range",
        "one line before memory is taken; nothing is converted silently",
    ),
    170: Row(
        "another data set or teacher, and no EMBEDDINGS_DIR",
        "a cache folder of its own; the first stays as it is",
    ),
    171: Row(
        "the folders of an album, which are no classes",
        "labels on request only, and said so; a cache serves no run another run's labels",
    ),
    172: Row(
        "names with line breaks, quotes, or `= + - @` first, in tables and lists that we write",
        "a row or line each, no formula; what we read gives the same name back",
    ),
    173: Row(
        "an export onto something that is there, or of columns that would take others' places",
        "refused before the run is read; --force replaces a file, whole, and never a folder",
    ),
    174: Row(
        "a copy of an earlier export was zeroed, or is another file of the same size",
        "the folder is refused by name, and nothing in it is touched",
    ),
    175: Row(
        "pictures whose names are not UTF-8 go out to programs that want text",
        "their bytes, as a URL spells them; where that cannot be, they are named",
    ),
    176: Row(
        "a run that people curated is extended",
        "renames, merges, splits and exclusions hold in the extended one, and can be undone",
    ),
    177: Row(
        "a dead input, zeros or one value throughout, is scored, or was trained on",
        "its outlier score is 1, whatever was trained on",
    ),
    178: Row(
        "the vote of the heads leaves clusters empty, or fewer rows differ than are wanted",
        "an empty cluster takes its part of another; what cannot be is counted in a warning",
    ),
    179: Row(
        "ImageNet's `meta.bin` is a pickle of something else",
        "one line that names it; nothing of it is run",
    ),
}
