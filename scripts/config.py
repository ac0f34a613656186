"""The settings of `python scripts/distill.py`: plain literals, read and never executed.

A preset beats the value here, and a flag of the same name beats both: `--learning_rate 1e-5` or
`--learning-rate 1e-5`. `python scripts/distill.py --help-all` says what each may be and lists the
presets; a name or value that cannot be is refused.
"""

# --- Teacher --------------------------------------------------------------------------------------

# Folder written by save_pretrained, or name on the Hugging Face Hub | train, or
# train:LAYERSxDIM:STEPS (a small one is trained on the data first; 4x192 for 800 steps) | none (no
# teacher: cross-entropy alone). Several with the same tokenizer, separated by commas: the mean of
# their divergences; with weights, made to sum to 1, as in "0.7*A, 0.3*B".
TEACHER_MODEL = "train"
# Folder that scripts/cache_teacher.py wrote; None: the teacher runs live. With a cache, the teacher
# takes no memory in training.
TEACHER_CACHE = None
# A server that answers for the teacher, such as http://host:8000/v1 of vLLM; None: it runs here.
# TEACHER_MODEL is then where its tokenizer is. A key is taken from the environment variable
# TEACHER_API_KEY.
TEACHER_URL = None
# Name that the server knows the teacher by; None: TEACHER_MODEL.
TEACHER_SERVED_AS = None
# What cache_teacher.py keeps: sample (tokens drawn from the teacher: unbiased, for forward_kl) |
# topk (its likeliest tokens and the mass of the rest: for every divergence) | hidden (what its
# output head gets, and the head once: exact, for every divergence and temperature); sample:K and
# topk:K keep K tokens at each position, 128 without a K. A server gives topk alone, 20 tokens
# without a K: vLLM as many as its --max-logprobs.
CACHE_METHOD = "sample"
# Keep the linear layers of a frozen teacher, and of the base that LORA_RANK trains adapters of
# (QLoRA), in fewer bits, by bitsandbytes: nf4 (4 bits); None: in MODEL_DTYPE. For a GPU's memory:
# on a CPU neither time nor memory is saved.
QUANTIZATION = None
# Run Python files that come with a model, where it needs them; read them first.
TRUST_REMOTE_CODE = False
# Keep the teacher in the host's memory between forward passes.
TEACHER_OFFLOAD = False
# Ask the teacher about everything anew, whatever TEACHER_CACHE holds.
FORCE_RECOMPUTE = False
# Write the damaged files of a teacher's cache again.
REBUILD_DAMAGED = False

# --- Student --------------------------------------------------------------------------------------

# Folder, or name on the Hub | layers:N (cut from the teacher's layers) | fresh:LAYERSxDIM (new
# weights of the teacher's architecture) | llama:LAYERSxDIM (of a Llama, whatever the teacher is).
STUDENT_MODEL = "fresh:2x128"
# Train low-rank adapters of this rank in place of all weights, from 0; 0: all weights.
LORA_RANK = 0
# LoRA alpha, above 0; the adapters are scaled by LORA_ALPHA / LORA_RANK.
LORA_ALPHA = 16.0
# Recompute activations in the backward pass: less memory, more time.
GRADIENT_CHECKPOINTING = False
# Peak learning rate of AdamW, 0 to 100; None: 3e-3 for new weights, 5e-4 for what is cut from a
# teacher, 2e-4 for adapters, 2e-5 for a pretrained model.
LEARNING_RATE = None

# --- Text -----------------------------------------------------------------------------------------

# Text to learn from: .jsonl .json .csv .parquet (messages | conversations | prompt, completion |
# question, answer | instruction, output | text) | .txt | a folder of them, or by save_to_disk |
# hf:NAME | stdlib (the source of Python's standard library).
DATA_PATH = "stdlib"
# Held-out text; None: the data's own test split, or a tenth of the data, left out of training.
EVAL_PATH = None
# Field of the records whose text is learned; None: the first form that a record has, as in
# DATA_PATH.
TEXT_FIELD = None
# Tokens in a row, 8 to 1048576. Longer: more context, more memory.
BLOCK_SIZE = 256
# Several documents in a row, where the model keeps them apart; off: one document per row, padded.
PACKING = True

# --- Loss -----------------------------------------------------------------------------------------

# Divergence between teacher and student: forward_kl | reverse_kl | js | skew_kl | skew_reverse_kl |
# tvd | js:BETA (GKD's, BETA between 0 and 1) | distillm2 (with ON_POLICY: skew_kl on text,
# skew_reverse_kl on what the student writes after the same prompts) | auto (forward_kl, or
# reverse_kl where ROUTER_MODE is all, ka or sar, as in the paper).
DIVERGENCE = "auto"
# Temperature of teacher and student in the divergence, 0.05 to 100. Higher: more weight on unlikely
# tokens.
TEMPERATURE = 1.0
# Weight of the divergence, from 0; it is multiplied by the temperature squared.
ALPHA_KD = 0.5
# Weight of the cross-entropy with the text, from 0.
ALPHA_CE = 0.5
# Weight of the distance between hidden states of student and teacher, layer by layer, from 0; 0:
# not compared. For a live teacher with the student's tokenizer.
ALPHA_HIDDEN = 0.0
# Which layers ALPHA_HIDDEN compares: last | uniform (all of the student's, at equal shares of the
# teacher's) | STUDENT:TEACHER,... (from 0, as in "0:1,1:3").
LAYER_MAP = "last"
# What of TEMPERATURE and the ALPHAs moves over the run, each from its own value to NAME:END or
# NAME:END:cosine, as in "temperature:1, alpha_hidden:0.1:cosine"; None: nothing.
SCHEDULE = None
# The clamps of older scripts, to see what they cost: "2.5" (logits) or "2.5:0.1:5.0" (logits, and a
# window for the losses); None: no clamp. float32 arithmetic needs none.
LEGACY_CLAMP = None
# How a teacher with another tokenizer is aligned: auto (the tokenizers are the same) | hidden
# (states, at common boundaries) | uld (sorted probabilities) | chunks (of text).
ALIGN = "auto"

# --- Text that a model writes ---------------------------------------------------------------------

# Share of the rows whose continuation the student writes itself, anew in each step, and the teacher
# judges token by token, 0 to 1; 0: none. With it, and with TEACHER_TEXT, a row holds one document.
ON_POLICY = 0.0
# Share of the rows whose continuation the teacher writes, once, in the place of the text
# (sequence-level distillation), 0 to 1; 0: none.
TEACHER_TEXT = 0.0
# Temperature of a continuation, 0 to 100; 0: the likeliest tokens.
ROLLOUT_TEMPERATURE = 1.0
# Prompts whose answers the report shows, 0 to 100.
GENERATIONS = 4
# Maximum tokens of a continuation with its end, and of an answer in the report, from 1. BLOCK_SIZE
# holds the prompt of a continuation too.
MAX_NEW_TOKENS = 128

# --- Routers of mixtures --------------------------------------------------------------------------

# Experts of a mixture-of-experts teacher: native (unchanged) | all | ka (all but one, some sampled)
# | sar (all, with a router that learns from the student) | auto (sar for a mixture, native for a
# dense teacher; the presets use this).
ROUTER_MODE = "native"
# Learning rate of the router in sar, 0 to 100.
ROUTER_LR = 1e-5
# Router file of an earlier run (router.safetensors), for the teacher; None: its own router.
ROUTER_WEIGHTS = None

# --- Optimization ---------------------------------------------------------------------------------

# Optimizer steps, from 1. A finished run goes on with RESUME, RUN_NAME and more of them; its
# learning rates are then those of a run of so many steps.
MAX_STEPS = 500
# Passes over the data, above 0 to 1000000; None: MAX_STEPS decides.
EPOCHS = None
# Rows per forward pass, of all processes together, from 1; a step has GRADIENT_ACCUMULATION_STEPS
# times as many. torchrun's processes share them. If memory runs out, lower it and raise
# GRADIENT_ACCUMULATION_STEPS.
BATCH_SIZE = 8
# Forward passes per step, from 1; the loss is the mean over all their tokens.
GRADIENT_ACCUMULATION_STEPS = 1
# Learning rate after the warm-up: cosine (to zero) | linear (to zero) | constant_with_warmup |
# constant (without a warm-up).
LR_SCHEDULE = "cosine"
# Fraction of the steps that warm up, 0 up to, not including, 1; LR_SCHEDULE follows.
WARMUP_FRACTION = 0.1
# Decoupled weight decay of AdamW, 0 to 10.
WEIGHT_DECAY = 0.01
# Largest norm of the gradient, above 0; None: no clipping.
CLIP_GRAD = 1.0

# --- Guard ----------------------------------------------------------------------------------------

# Skip a step whose gradient norm is this many times its running median, above 1.
SPIKE_FACTOR = 100.0
# Skip a step whose gradient norm is above this, above 0; None: SPIKE_FACTOR alone decides. Older
# scripts had it at 2.0; new weights have larger norms than that for many steps.
GRAD_NORM_THRESHOLD = None
# Bad steps in a row that end the run, from 1; None: after 20 the student goes back to its last good
# state with a fresh optimizer, and 20 more end the run.
STOP_AFTER = 10

# --- Devices --------------------------------------------------------------------------------------

# Precision of matrix products: auto (what suits the device) | float32 | bfloat16 | float16.
# Trainable weights and losses are always float32. A dtype that is slow on the device is not used,
# and the log says so.
MODEL_DTYPE = "auto"
# With torchrun: keep a piece of each weight of student and teacher on each GPU (FSDP2), for models
# that are too large for one; off: all of them on each (DDP).
SHARD = False

# --- Evaluation -----------------------------------------------------------------------------------

# Steps between two evaluations on held-out text, from 1; the best of them, step 0 included, is the
# student that is saved.
EVAL_EVERY = 100
# Maximum held-out rows of each of two parts: one to choose the best student by, and one, which no
# choice is made on, for the table, from 1.
EVAL_ROWS = 200
# Also train the same student by cross-entropy alone, on an equal budget, to see whether distilling
# pays.
BASELINE = False

# --- Run ------------------------------------------------------------------------------------------

# Steps between two lines of metrics.jsonl, from 1.
LOG_EVERY = 10
# Steps between two checkpoints, from 1. An interruption loses at most this many steps.
CHECKPOINT_EVERY = 100
# Five steps with evaluation and saving, to see whether everything fits.
DRY_RUN = False
# Who draws the curves, beside metrics.jsonl: none | tensorboard (files in the run folder) | wandb |
# trackio (through their own packages).
REPORT_TO = "none"
# Where to compute: auto (a GPU if there is one) | cpu | cuda | cuda:N | mps.
DEVICE = "auto"
# Seed of all random numbers, 0 to 4294967295. On the CPU the same seed gives the same run.
SEED = 0
# Where every run creates a folder with its model, metrics and report.
RUNS_DIR = "runs"
# Name of this run's folder; None: the date and time. A finished run is never overwritten.
RUN_NAME = None
# Continue the last unfinished run, or the one named by RUN_NAME.
RESUME = False
