"""The settings of `python train.py`: plain literals, read and never executed.

A flag of the same name beats the value here: `python train.py --n_heads 16` or `--n-heads 16`.
`python train.py --help_all` lists their values; unknown names and invalid values are refused.
"""

# --- Data -----------------------------------------------------------------------------------------

# What to cluster: digits | cifar10 | cifar100 | stl10 | fashion_mnist | imagenet | path of a folder
# of images, or of sounds, at any depth | path of features (.npy .npz .pt .safetensors .h5ad), or of
# a table of features, texts, pictures or sound files (.parquet .csv .tsv .jsonl, or a folder of
# save_to_disk or of Parquet files).
DATASET = "digits"
# Held-out folder or file of features; None: the data set's own test split, if it has one.
DATASET_TEST = None
# Labels to score the answer by: folders (the first folder below DATASET is a file's class) | auto
# (those of a named data set or of a feature file; a folder has none) | none. Never used for
# training. The folders of an album are not classes.
LABELS = "auto"
# Column (or array) that holds the features in a feature file, or the texts, pictures or sound files
# in a table, also of DATASET_TEST; None: the only list column, or one called features, embeddings,
# x or data; without features, pictures, sounds or a column text.
COLUMN = None
# Column (or array) that holds the labels in a feature file or table, also of DATASET_TEST; None:
# one called label, class or alike, or target or y if it has few values that are integers or text.
LABEL_COLUMN = None
# Folder of data sets, to which DOWNLOAD writes.
DATA_DIR = "data"
# Download the data set (torchvision's sets) where it is missing. Off: no data set is downloaded.
DOWNLOAD = False

# --- Teacher and embeddings -----------------------------------------------------------------------

# Frozen model that embeds the images, texts or sounds: auto (chosen by the data) | pixels | dinov2
# | dinov3 | siglip2 | pe | radio | aimv2 | tipsv2 | clip | franca | efficientnet_lite0 |
# efficientnet_lite1 | efficientnet_lite2 | timm:NAME | torchvision:NAME | open_clip:NAME | minilm
# (texts) | resemblyzer (voices) | hf:NAME (transformers, for all three) | package.module.Class
# (your own) | features (DATASET holds embeddings already). With auto: pixels for small gray images
# such as digits; for photographs dinov2 if its weights are cached or can be downloaded, else
# efficientnet_lite0; for texts minilm, for sounds resemblyzer, for embeddings features. The run
# says which one it took, and keeps it. Other sizes, such as dinov2_vitb14_reg or dinov3_vitl16, are
# listed in docs/images.md.
TEACHER = "auto"
# Local file of the teacher's weights, for machines without a network; None: the published ones.
TEACHER_WEIGHTS = None
# Width that the teacher's embeddings must have, at least 1; None: any. The run stops before it
# embeds anything if the teacher has another width.
EMBEDDING_DIM = None
# Side of the teacher's input in pixels, at least 1, at most 4096; None: the model's own (DINOv2:
# 224).
IMAGE_SIZE = None
# Which output of a vision transformer is the embedding: class (token) | patch (mean of the patch
# tokens) | both (concatenated) | last4 (class tokens of the last four layers, and the mean patch) |
# patches (all patch tokens, with train.py extract).
TOKEN = "class"
# Threads that decode images, at least 0, at most 256; 0: chosen by the device. They decode ahead of
# a GPU's teacher, and between the batches of a CPU's. Raise it if the progress bar waits for the
# disk.
WORKERS = 0
# Where the teacher's embeddings are cached; auto: data/embeddings for digits by pixels, else
# data/embeddings/DATASET-TEACHER-DIGEST, a folder for each data set and teacher. The digest is of
# all samples, the teacher's weights and its dtype: where one of them changes, another folder is
# taken.
EMBEDDINGS_DIR = "auto"
# Embed all samples again; the old cache stays until the new one is complete.
FORCE_RECOMPUTE = False
# Embed damaged shards of the cache again; verified shards are kept.
REBUILD_DAMAGED = False

# --- Neighbors and clusters -----------------------------------------------------------------------

# Wider embeddings are reduced to this many principal components by PCA, at least 1; None: never.
# The heads then reach the same accuracy in a fraction of the time.
PCA_DIM = 256
# Divide each column of the embeddings by its standard deviation, after subtracting its mean. For
# tables whose columns have different units; not for embeddings of a network.
STANDARDIZE = False
# Nearest neighbors that a sample may be paired with, at least 1. Fewer for small or many classes:
# clearly below the number of samples per class.
N_NEIGHBORS = 20
# Number of clusters, at least 2; None: the number of classes if the data set has labels, else it is
# found; auto: it is found.
N_CLUSTERS = None

# --- Heads and their training ---------------------------------------------------------------------

# What forms the clusters: consensus (partitions of the neighbor graph vote, and heads that start
# from them and learn by LOSS vote as one family more) | heads (these heads vote alone).
METHOD = "consensus"
# Sizes of the clusters: even (similar) | any (very different, such as species or an album). With
# any, partitions vote by those methods that have no preferred size; heads, which have one, learn
# the answer but do not vote.
CLUSTER_SIZES = "even"
# Heads trained side by side, at least 1, at most 4096. More heads: a steadier answer,
# proportionally more time.
N_HEADS = 16
# Import path of the head's class, package.module.Class. Your own head goes here, see heads/.
HEAD = "ssl_kd.heads.TEMIHead"
# Width of a head's hidden layer, at least 1; its bottleneck is half as wide. Wider for
# high-dimensional embeddings and many classes.
HIDDEN_DIM = 96
# What the heads minimize to find clusters: temi (pairwise mutual information) | sharpened
# (self-distillation towards a sharper teacher) | swav (prediction of balanced assignments) | scan
# (same cluster for neighbors, large entropy over all) | iic (mutual information of the clusters of
# two views) | fixed (cross-entropy to the partition alone) | package.module.Class (your own).
LOSS = "temi"
# Exponent of the pairwise mutual information, above 0, at most 1; 1: the plain objective. Lower:
# more evenly sized clusters. At 0.5 and below unsure answers score as high as sure ones, and
# clusters mix.
BETA = 0.6
# Temperature of the students' softmax, at least 0.05, at most 100. Lower: harder assignments.
STUDENT_TEMP = 0.1
# Temperature of the EMA teachers' softmax, at least 0.04, at most 100. With LOSS sharpened at most
# STUDENT_TEMP.
TEACHER_TEMP = 0.1
# Weight of a pair in the loss: none | own (agreement of the head itself) | mean (of all heads, as
# in the paper; couples the heads).
INSTANCE_WEIGHT = "none"
# Peak learning rate of AdamW, above 0, at most 100. Lower it if the loss curves are jagged.
LEARNING_RATE = 0.004
# Largest gradient norm of each head, above 0; None: no clipping.
CLIP_GRAD = 1.0
# Pairs per step, at least 1. Several times the number of clusters.
BATCH_SIZE = 256
# Passes over the data in each stage of the training, at least 1; None: until the heads have
# converged, at most 200.
EPOCHS = None
# Optimizer steps of each stage of the training, at least 1; None: no limit but EPOCHS. If both are
# set, the first to be reached ends the stage.
MAX_STEPS = None
# Run the students in half precision where the device is faster with it (GPUs; CPUs with bf16
# products). Weights and losses stay float32 in any case.
USE_FP16 = False

# --- Answer and run -------------------------------------------------------------------------------

# Finished run that the samples of DATASET are added to: its folder, or its name under RUNS_DIR;
# None: train. Teacher and clusters are those of the run; unlike samples form new clusters.
EXTEND = None
# Publication whose settings to use: temi-cifar10 | temi-cifar100 | temi-stl10 | temi-imagenet |
# dino-knn | dinov2-knn | dinov2-linear (ssl_kd recipes shows them); None: none; flags, and the
# other lines of a settings file, override them.
RECIPE = None
# Run k-means and, where the size allows, spectral clustering on the same embeddings, and a linear
# probe where there are labels (which are never used for training).
BASELINES = True
# Steps between two lines of metrics.jsonl, at least 1.
LOG_EVERY = 20
# Steps between two checkpoints, at least 1. An interruption loses at most this many steps.
CHECKPOINT_EVERY = 200
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
