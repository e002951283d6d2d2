"""Names of settings in PFLlib, Flower, FL-bench, torch and Keras, and the setting that a wrong name probably means."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

OURS = {  # our name -> other libraries' names for it
    "rounds": "num_rounds n_rounds global_rounds gr communication_rounds num_communication_rounds comm_rounds "
    "comm_round num_server_rounds server_rounds global_epochs global_epoch total_rounds max_rounds",
    "local_epochs": "epochs epoch num_epochs n_epochs max_epochs local_epoch local_ep ls num_local_epochs "
    "client_epochs local_steps num_local_steps local_updates",
    "batch_size": "batch bs batchsize lbs local_bs local_batch_size train_batch_size minibatch_size",
    "lr": "learning_rate learningrate local_learning_rate client_learning_rate local_lr client_lr eta base_lr "
    "init_lr initial_lr lr0 step_size",
    "schedule": "scheduler lr_schedule lr_scheduler lr_decay lr_steps learning_rate_decay learning_rate_decay_gamma "
    "ldg",
    "optimizer": "opt optim optimiser client_optimizer",
    "weight_decay": "wd l2 l2_reg decay",
    "clip_gradient": "grad_clip gradient_clip gradient_clip_val clip_grad clip_grad_norm clipnorm max_grad_norm",
    "join_ratio": "fraction frac client_fraction fraction_fit participation participation_rate participation_ratio "
    "sample_ratio sample_rate sampling_rate client_ratio clients_per_round client_num_per_round",
    "evaluate_every": "eval_gap eg eval_every eval_interval eval_freq test_gap test_every test_interval",
    "new_clients": "num_new_clients nnc",
    "seed": "random_state random_seed manual_seed global_seed",
    "patience": "early_stopping early_stop",
    "until": "target_accuracy goal",
    "max_time": "timeout time_limit",
    "checkpoint_every": "save_gap save_every",
    "dp_noise": "noise_multiplier",
    "dp_clip": "max_grad_norm l2_norm_clip",
    "dp_delta": "delta target_delta",
    "pull": "mu lambda lamda lam",
    "align": "lambda lamda lam mu",
    "personal_epochs": "plocal_epochs plocal_steps pls",
    "head_epochs": "plocal_epochs plocal_steps pls",
    "finetune_epochs": "fine_tuning_epochs finetuning_epochs fine_tuning_epoch fte",
    "device": "gpu gpus cuda use_cuda accelerator device_id did",
    "precision": "dtype amp fp16 bf16 half mixed_precision",
    "processes": "num_workers n_workers workers n_jobs num_processes num_cpus",
    "num_clients": "n_clients clients client_num client_num_in_total num_users n_users total_clients num_partitions "
    "num_supernodes cn",
    "alpha": "dirichlet_alpha dir_alpha concentration",
    "dataset": "dataset_name data_name",
    "data_dir": "data_root data_path",
    "partition": "partition_method split_type",
    "validation": "val_ratio valset_ratio validation_split",
    "test_share": "test_ratio testset_ratio test_split",
    "seeds": "times num_seeds n_seeds repeats num_trials",
    "method": "algorithm algo strategy",
    "model": "model_name network net arch",
    "out": "output output_dir out_dir save_dir save_path log_dir logdir",
    "watch": "callback callbacks",
    "track": "logger use_wandb wandb",
    "progress": "verbose",
}  # fmt: skip
THEIRS: dict[str, list[str]] = {}
for _ours, _words in OURS.items():
    for _word in _words.split():
        THEIRS.setdefault(_word, []).append(_ours)
MOST = 3  # names that are suggested together


def translated(name: str, known: Sequence[str]) -> list[str]:
    """The names among ours that other libraries call so."""
    return [ours for ours in THEIRS.get(name.lower().replace("-", "_"), ()) if ours in known]


def nearest(name: str, fitting: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    """What a wrong name probably means, with underscores: names that fit here before others."""
    word = name.lower().replace("-", "_")
    return (
        translated(name, fitting)[:MOST]
        or translated(name, others)[:1]
        or difflib.get_close_matches(word, fitting, n=1, cutoff=0.8)
        or [known for known in fitting if word in known.split("_")][:MOST]
        or difflib.get_close_matches(word, fitting, n=1, cutoff=0.7)
        or difflib.get_close_matches(word, others, n=1, cutoff=0.7)
    )
