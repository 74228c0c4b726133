"""The cases of the reference suite, by group."""

from __future__ import annotations

from collections.abc import Mapping

from tests.tensorflow.reference.case import SAME, SAME_WEIGHTS, Case, differs, refused

_OWN_ROWS = "each worker normalizes by its own rows"
_VALID_ROWS = "the mean of each worker's mean over its valid rows"
_ADDED_UP = "TensorFlow adds up the workers' losses: divide yours by `strategy.num_replicas_in_sync`"
_DIVIDED = "same weights; `compute_loss` returns the loss divided by the number of workers"
_OWN_MASK = "each worker draws the same mask for its rows"
_ACCUMULATION = refused("gradient_accumulation_steps")
_OVERWRITE = refused("ema_overwrite_frequency")
_SCALE = refused("dynamic_growth_steps")
_NADAM = refused("Nadam of Keras 3 would miscount")
_JIT = refused("jit_compile=True cannot be used with parameter servers")
_XLA = refused("Collectives are not yet implemented for CPU devices when compiling with XLA")
_EAGERLY = refused("run_eagerly=True cannot be used with parameter servers")
_NO_SUM = refused("that depends on earlier values")

GROUPS: Mapping[str, tuple[Case, ...]] = {
    "optimizers": (
        Case("SGD", lambda m: m.dense(m.optimizers.SGD(0.1), metrics=["mae"]), is_quick=True),
        Case(
            "SGD with a linear loss",
            lambda m: m.stack(optimizer=m.optimizers.SGD(0.1), loss=m.linear_loss),
            data="one_batch",
            options={"steps_per_epoch": 40},
            asynchronous=SAME_WEIGHTS,
        ),
        Case("momentum", lambda m: m.dense(m.optimizers.SGD(0.1, momentum=0.9))),
        Case("Nesterov", lambda m: m.dense(m.optimizers.SGD(0.1, momentum=0.9, nesterov=True))),
        Case("RMSprop", lambda m: m.dense(m.optimizers.RMSprop(0.01, momentum=0.5, centered=True))),
        Case("Adagrad", lambda m: m.dense(m.optimizers.Adagrad(0.1))),
        Case("Adadelta", lambda m: m.dense(m.optimizers.Adadelta(1.0))),
        Case("Adam", lambda m: m.dense(m.optimizers.Adam(0.05))),
        Case("amsgrad", lambda m: m.dense(m.optimizers.Adam(0.05, amsgrad=True))),
        Case("AdamW with excluded variables", lambda m: m.without_bias_decay(), is_quick=True),
        Case("Adamax", lambda m: m.dense(m.optimizers.Adamax(0.05))),
        Case("Nadam", lambda m: m.dense(m.optimizers.Nadam(0.05)), ps=_NADAM, asynchronous=_NADAM),
        Case("Ftrl", lambda m: m.dense(m.optimizers.Ftrl(0.1))),
        Case("Lion", lambda m: m.dense(m.optimizers.Lion(0.01))),
        Case("Adafactor", lambda m: m.dense(m.optimizers.Adafactor(0.05))),
        Case("Lamb", lambda m: m.dense(m.optimizers.Lamb(0.05))),
        Case("Muon", lambda m: m.dense(m.optimizers.Muon(0.05))),
        Case("clipnorm", lambda m: m.dense(m.optimizers.SGD(0.5, clipnorm=0.2))),
        Case("clipvalue", lambda m: m.dense(m.optimizers.SGD(0.5, clipvalue=0.1))),
        Case("global_clipnorm", lambda m: m.dense(m.optimizers.SGD(0.5, global_clipnorm=0.2)), is_quick=True),
        Case("use_ema", lambda m: m.dense(m.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))),
        Case(
            "ema_overwrite_frequency",
            lambda m: m.dense(m.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3)),
            ps=_OVERWRITE,
            in_step=_OVERWRITE,
            asynchronous=_OVERWRITE,
        ),
        Case("weight_decay", lambda m: m.dense(m.optimizers.SGD(0.1, weight_decay=0.1))),
        Case(
            "learning rate schedule",
            lambda m: m.dense(m.optimizers.Adam(m.optimizers.schedules.InverseTimeDecay(0.1, 2, 0.5))),
        ),
        Case(
            "gradient_accumulation_steps",
            lambda m: m.dense(m.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
            ps=_ACCUMULATION,
            in_step=_ACCUMULATION,
            asynchronous=_ACCUMULATION,
            is_quick=True,
        ),
        Case("loss_scale_factor", lambda m: m.dense(m.optimizers.SGD(0.1, loss_scale_factor=8.0))),
        Case(
            "LossScaleOptimizer",
            lambda m: m.dense(m.optimizers.LossScaleOptimizer(m.optimizers.SGD(0.1))),
            ps=_SCALE,
            asynchronous=_SCALE,
        ),
    ),
    "layers": (
        Case("kernel_constraint", lambda m: m.dense(hidden={"kernel_constraint": "unit_norm"})),
        Case(
            "Conv2D and MaxPooling2D",
            lambda m: m.stack(
                m.layers.Conv2D(3, 3, activation="relu"),
                m.layers.MaxPooling2D(),
                m.layers.Flatten(),
                shape=(6, 6, 2),
                outputs=3,
                metrics=["accuracy"],
            ),
            data="images",
        ),
        Case(
            "BatchNormalization",
            lambda m: m.stack(m.layers.Dense(6), m.layers.BatchNormalization(momentum=0.8)),
            in_step=differs(_OWN_ROWS),
            is_quick=True,
        ),
        Case("LayerNormalization", lambda m: m.stack(m.layers.Dense(6), m.layers.LayerNormalization())),
        Case("GroupNormalization", lambda m: m.stack(m.layers.Dense(6), m.layers.GroupNormalization(2))),
        Case("SpectralNormalization", lambda m: m.stack(m.layers.SpectralNormalization(m.layers.Dense(6)))),
        Case(
            "Dropout with a seed",
            lambda m: m.stack(m.layers.Dense(6), m.layers.Dropout(0.5, seed=3)),
            in_step=differs(_OWN_MASK),
        ),
        Case("Embedding", lambda m: m.embedding(m.layers.Flatten()), data="words"),
        Case(
            "Embedding with Adam",
            lambda m: m.embedding(m.layers.Flatten(), optimizer=m.optimizers.Adam(0.05)),
            data="words",
            is_quick=True,
        ),
        Case("Embedding of two inputs", lambda m: m.shared_embedding(m.optimizers.Adam(0.05)), data="two_inputs"),
        Case(
            "LSTM with mask_zero",
            lambda m: m.embedding(m.layers.LSTM(3), mask_zero=True),
            data="words",
        ),
        Case(
            "Bidirectional GRU with mask_zero",
            lambda m: m.embedding(m.layers.Bidirectional(m.layers.GRU(3)), mask_zero=True),
            data="words",
        ),
        Case("MultiHeadAttention", lambda m: m.attention(), data="words"),
        Case("Normalization and Rescaling", lambda m: m.normalized()),
        Case("Discretization", lambda m: m.discretized()),
        Case("StringLookup", lambda m: m.looked_up(), data="strings", is_quick=True),
        Case("trainable=False", lambda m: m.frozen()),
        Case(
            "mixed_bfloat16",
            lambda m: m.dense(m.optimizers.SGD(0.1), hidden={"dtype": "mixed_bfloat16"}),
            tolerance=3e-2,
            is_quick=True,
        ),
        Case("float64", lambda m: m.dense(m.optimizers.SGD(0.1), hidden={"dtype": "float64"})),
    ),
    "losses": (
        Case(
            "several outputs with loss_weights",
            lambda m: m.several(loss_weights={"number": 1.0, "kind": 0.3}, metrics={"kind": "accuracy"}),
            data="two_outputs",
            is_quick=True,
        ),
        Case("a loss of your own", lambda m: m.dense(loss=m.absolute_loss)),
        Case("sample weights", lambda m: m.dense(weighted_metrics=["mae"]), data="weighted"),
        Case(
            "class_weight",
            lambda m: m.dense(outputs=3, loss="sparse_categorical_crossentropy"),
            data="classes",
            options={"class_weight": {0: 0.5, 2: 4.0}},
            is_quick=True,
        ),
        Case("add_loss", lambda m: m.stack(m.layers.Dense(6), m.AddsLoss())),
        Case("kernel_regularizer", lambda m: m.dense(hidden={"kernel_regularizer": "l2"})),
        Case("a masked loss", lambda m: m.embedding(mask_zero=True), data="word_targets", in_step=differs(_VALID_ROWS)),
        Case(
            'reduction="sum"',
            lambda m: m.dense(m.optimizers.SGD(0.01), loss=m.losses.MeanSquaredError(reduction="sum")),
        ),
        Case("compute_loss of your own", lambda m: m.compiled(m.OwnLoss(), loss=None), in_step=differs(_ADDED_UP)),
    ),
    "metrics": (
        Case(
            "BinaryAccuracy and AUC",
            lambda m: m.classifier(m.metrics.BinaryAccuracy(), m.metrics.AUC(num_thresholds=20, name="auc")),
            data="binary_batch",
            asynchronous=SAME,
        ),
        Case(
            "Precision with several thresholds",
            lambda m: m.classifier(m.metrics.Precision(thresholds=[0.3, 0.6], name="precision")),
            data="binary_batch",
            asynchronous=SAME,
        ),
        Case(
            "F1Score",
            lambda m: m.classifier(m.metrics.F1Score(), outputs=3),
            data="one_hot_batch",
            asynchronous=SAME,
        ),
        Case(
            "MeanIoU and TopKCategoricalAccuracy",
            lambda m: m.classifier(
                m.metrics.OneHotMeanIoU(3, name="overlap"), m.metrics.TopKCategoricalAccuracy(2), outputs=3
            ),
            data="one_hot_batch",
            asynchronous=SAME,
        ),
        Case(
            "weighted_metrics",
            lambda m: m.classifier(weighted_metrics=[m.metrics.AUC(num_thresholds=20, name="auc"), "mae"]),
            data="weighted_batch",
            asynchronous=SAME,
        ),
        Case(
            "metrics of several outputs",
            lambda m: m.several(m.optimizers.SGD(0.0), metrics={"number": ["mae", "mse"], "kind": ["accuracy"]}),
            data="two_outputs_batch",
            asynchronous=SAME,
        ),
        Case(
            "a metric that returns a dict",
            lambda m: m.classifier(m.Rows()),
            data="binary_batch",
            asynchronous=SAME,
            is_quick=True,
        ),
        Case(
            "a metric that keeps a maximum",
            lambda m: m.classifier(m.Largest()),
            data="binary_batch",
            ps=_NO_SUM,
            in_step=_NO_SUM,
            asynchronous=_NO_SUM,
            is_quick=True,
        ),
    ),
    "callbacks": (
        Case(
            "LearningRateScheduler",
            lambda m: m.dense(),
            callbacks=lambda m: [m.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch))],
        ),
        Case(
            "EarlyStopping with restore_best_weights",
            lambda m: m.dense(),
            options={"epochs": 4},
            callbacks=lambda m: [
                m.callbacks.EarlyStopping("loss", min_delta=100.0, patience=1, restore_best_weights=True)
            ],
            is_quick=True,
        ),
        Case(
            "ReduceLROnPlateau",
            lambda m: m.dense(),
            options={"epochs": 3},
            callbacks=lambda m: [m.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=100.0)],
        ),
        Case(
            "ModelCheckpoint with save_best_only",
            lambda m: m.dense(),
            callbacks=lambda m: [m.callbacks.ModelCheckpoint("best.keras", monitor="loss", save_best_only=True)],
            read=lambda m, model: m.best_weights(),
        ),
        Case(
            "CSVLogger",
            lambda m: m.dense(metrics=["mae"]),
            callbacks=lambda m: [m.callbacks.CSVLogger("log.csv")],
            read=lambda m, model: m.log_file(),
        ),
        Case(
            "TerminateOnNaN",
            lambda m: m.dense(m.optimizers.SGD(1e30)),
            data="one_batch",
            options={"epochs": 9},
            callbacks=lambda m: [m.callbacks.TerminateOnNaN()],
        ),
    ),
    "training": (
        Case("train_step of your own", lambda m: m.compiled(m.OwnStep()), is_quick=True),
        Case(
            "GradientTape in train_step",
            lambda m: m.compiled(m.OwnTape(), metrics=["mae"]),
            in_step=differs(_DIVIDED),
        ),
        Case("two optimizers in train_step", lambda m: m.compiled(m.TwoOptimizers()), is_quick=True),
        Case("a Sequential model without Input", lambda m: m.compiled(m.unbuilt())),
        Case("a subclassed model", lambda m: m.compiled(m.Subclassed())),
        Case("steps_per_execution", lambda m: m.dense(steps_per_execution=4)),
        Case(
            "jit_compile=True",
            lambda m: m.dense(jit_compile=True),
            ps=_JIT,
            in_step=_XLA,
            asynchronous=_JIT,
        ),
        Case("run_eagerly=True", lambda m: m.dense(run_eagerly=True), ps=_EAGERLY, asynchronous=_EAGERLY),
        Case("validation_data", lambda m: m.dense(metrics=["mae"]), options={"validation_data": True}, is_quick=True),
        Case("steps_per_epoch", lambda m: m.dense(), options={"steps_per_epoch": 3, "epochs": 3}),
        Case("initial_epoch", lambda m: m.dense(), options={"initial_epoch": 1, "epochs": 3}),
    ),
}
CASES = {each.name: each for cases in GROUPS.values() for each in cases}
