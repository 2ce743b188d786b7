"""Figures that papers print, as facts to compare with, and what is inferred where they are silent.

MoEvement (NSDI 2026): table 3 (§5.2), table 7 (§5.7), figure 11 (§5.4); recoveries of others, each
with its source. Nothing here is computed or fitted; a number is in this module because the paper
prints it. Docstrings name the few that follow from others.
"""

from __future__ import annotations

from dataclasses import dataclass

MTBFS_S = (7200, 3600, 1800, 1200, 600)
"""Mean times between failures of table 3: 2 h, 1 h, 30, 20 and 10 minutes."""

LENGTH_S = 12 * 3600
"""Length of each run of tables 3 and 7."""

BATCH, MICRO_BATCH = 512, 32
"""Sequences of a batch and of a micro-batch (§5.1, §5.7)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """Columns of one system in table 3, by MTBF."""

    ettr: tuple[float, ...]
    recovery_s: tuple[float, ...]
    """All recoveries of a run together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """One model of table 3."""

    name: str
    parameters: float
    stages: int
    dp: int
    ep: int
    window_steps: int
    overhead_s: float
    """What MoEvement adds to a step."""
    moc_overhead_s: float
    moc_overhead: float
    """The same as a portion of the step, printed with one digit: from both follows the step."""
    checkfreq_steps: int
    checkfreq_overhead_s: float
    moevement: Baseline
    checkfreq: Baseline
    gemini: Baseline
    moc: Baseline

    @property
    def step_s(self) -> float:
        """T_iter, inferred: MoC's overhead in seconds by its overhead in percent, ±10 %."""
        return self.moc_overhead_s / self.moc_overhead

    @property
    def micro_batches(self) -> int:
        """M of one pipeline, inferred from batch, micro-batch, DP and EP."""
        return max(1, BATCH // MICRO_BATCH // (self.dp * self.ep))


TABLE_3 = (
    TrainedModel(
        name="MoE-LLaVa",
        parameters=2.9e9,
        stages=6,
        dp=2,
        ep=8,
        window_steps=3,
        overhead_s=0.01,
        moc_overhead_s=0.14,
        moc_overhead=0.08,
        checkfreq_steps=57,
        checkfreq_overhead_s=0.03,
        moevement=Baseline(
            ettr=(0.981, 0.979, 0.975, 0.971, 0.964), recovery_s=(11, 24, 57, 74, 117)
        ),
        checkfreq=Baseline(
            ettr=(0.945, 0.914, 0.853, 0.792, 0.712), recovery_s=(1265, 2530, 5059, 7589, 11178)
        ),
        gemini=Baseline(
            ettr=(0.959, 0.939, 0.897, 0.852, 0.764), recovery_s=(938, 1551, 2203, 2570, 4161)
        ),
        moc=Baseline(ettr=(0.922, 0.375, 0.328, 0.231, 0.184), recovery_s=(10, 20, 41, 61, 98)),
    ),
    TrainedModel(
        name="GPT-MoE",
        parameters=7.3e9,
        stages=3,
        dp=4,
        ep=8,
        window_steps=3,
        overhead_s=0.03,
        moc_overhead_s=0.18,
        moc_overhead=0.09,
        checkfreq_steps=78,
        checkfreq_overhead_s=0.03,
        moevement=Baseline(
            ettr=(0.979, 0.976, 0.971, 0.966, 0.959), recovery_s=(18, 28, 78, 105, 161)
        ),
        checkfreq=Baseline(
            ettr=(0.937, 0.903, 0.834, 0.765, 0.687), recovery_s=(1424, 2848, 4486, 8543, 13086)
        ),
        gemini=Baseline(
            ettr=(0.947, 0.923, 0.868, 0.815, 0.722), recovery_s=(1121, 1718, 2160, 3259, 4627)
        ),
        moc=Baseline(ettr=(0.919, 0.384, 0.326, 0.220, 0.179), recovery_s=(13, 25, 50, 76, 132)),
    ),
    TrainedModel(
        name="QWen-MoE",
        parameters=14.3e9,
        stages=6,
        dp=2,
        ep=8,
        window_steps=5,
        overhead_s=0.04,
        moc_overhead_s=0.19,
        moc_overhead=0.09,
        checkfreq_steps=113,
        checkfreq_overhead_s=0.05,
        moevement=Baseline(
            ettr=(0.981, 0.977, 0.970, 0.963, 0.957), recovery_s=(17, 33, 83, 140, 207)
        ),
        checkfreq=Baseline(
            ettr=(0.927, 0.898, 0.841, 0.783, 0.703), recovery_s=(1170, 2340, 4680, 7020, 10040)
        ),
        gemini=Baseline(
            ettr=(0.934, 0.915, 0.868, 0.819, 0.717), recovery_s=(961, 1402, 2114, 2331, 3495)
        ),
        moc=Baseline(ettr=(0.927, 0.380, 0.325, 0.205, 0.162), recovery_s=(15, 30, 60, 90, 146)),
    ),
    TrainedModel(
        name="DeepSeek-MoE",
        parameters=16.4e9,
        stages=12,
        dp=1,
        ep=8,
        window_steps=6,
        overhead_s=0.06,
        moc_overhead_s=0.22,
        moc_overhead=0.08,
        checkfreq_steps=124,
        checkfreq_overhead_s=0.08,
        moevement=Baseline(
            ettr=(0.975, 0.970, 0.965, 0.956, 0.951), recovery_s=(22, 43, 104, 167, 241)
        ),
        checkfreq=Baseline(
            ettr=(0.902, 0.877, 0.827, 0.777, 0.672), recovery_s=(992, 1984, 3967, 5951, 9402)
        ),
        gemini=Baseline(
            ettr=(0.910, 0.894, 0.853, 0.814, 0.728), recovery_s=(800, 1218, 1879, 1983, 3236)
        ),
        moc=Baseline(ettr=(0.933, 0.349, 0.324, 0.168, 0.134), recovery_s=(17, 35, 70, 104, 176)),
    ),
)

GPUS = 96
"""GPUs that the models of table 3 were trained on, eight in a node (§5.1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """One row of table 7: DeepSeek-MoE in some precision. By MTBF: 1 h, 30 min, 10 min."""

    compute: str
    master: str
    optimizer: str
    state_bytes: int
    """Bytes of state of a parameter in a full snapshot: master weight and optimizer."""
    window_steps: int
    moc_stall_s: float
    """What a full snapshot in each step adds to it: MoC once its budget is exhausted (10 min)."""
    moc_stall: float
    """The same as a portion of the step."""
    gemini_steps: tuple[int, int, int]
    gemini_overhead_s: tuple[float, float, float]
    ettr: tuple[float, float, float]
    """Effective training time ratios of MoEvement."""

    @property
    def name(self) -> str:
        """The precisions of compute weights, master weights and optimizer."""
        return f"{self.compute}, {self.master}, {self.optimizer}"

    @property
    def step_s(self) -> float:
        """T_iter, inferred from MoC's stall in seconds and in percent."""
        return round(self.moc_stall_s / self.moc_stall, 1)


TABLE_7_MTBFS_S = (3600, 1800, 600)

TABLE_7 = (
    Precision(
        compute="FP16",
        master="FP16",
        optimizer="FP16 + FP16",
        state_bytes=6,
        window_steps=3,
        moc_stall_s=3.51,
        moc_stall=1.17,
        gemini_steps=(71, 48, 27),
        gemini_overhead_s=(0.11, 0.16, 0.29),
        ettr=(0.984, 0.979, 0.973),
    ),
    Precision(
        compute="FP8",
        master="FP32",
        optimizer="FP32 + FP32",
        state_bytes=12,
        window_steps=6,
        moc_stall_s=10.70,
        moc_stall=4.65,
        gemini_steps=(182, 94, 46),
        gemini_overhead_s=(0.09, 0.17, 0.34),
        ettr=(0.952, 0.946, 0.941),
    ),
    Precision(
        compute="FP8",
        master="FP16",
        optimizer="FP32 + FP32",
        state_bytes=10,
        window_steps=4,
        moc_stall_s=8.73,
        moc_stall=4.16,
        gemini_steps=(157, 79, 43),
        gemini_overhead_s=(0.08, 0.16, 0.30),
        ettr=(0.966, 0.958, 0.953),
    ),
    Precision(
        compute="FP8",
        master="FP16",
        optimizer="FP8 + FP16",
        state_bytes=5,
        window_steps=3,
        moc_stall_s=3.52,
        moc_stall=1.85,
        gemini_steps=(68, 61, 29),
        gemini_overhead_s=(0.10, 0.11, 0.22),
        ettr=(0.976, 0.968, 0.965),
    ),
    Precision(
        compute="FP8",
        master="FP8",
        optimizer="FP8 + FP16",
        state_bytes=4,
        window_steps=3,
        moc_stall_s=2.63,
        moc_stall=1.55,
        gemini_steps=(59, 52, 24),
        gemini_overhead_s=(0.09, 0.18, 0.31),
        ettr=(0.979, 0.976, 0.971),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledModel:
    """One model of figure 11."""

    name: str
    parameters: float
    gpus: int
    stages: int
    pipelines: int


FIGURE_11 = (
    ScaledModel(name="32B", parameters=32e9, gpus=512, stages=16, pipelines=4),
    ScaledModel(name="67B", parameters=67e9, gpus=1536, stages=24, pipelines=8),
    ScaledModel(name="145B", parameters=145e9, gpus=4096, stages=32, pipelines=16),
    ScaledModel(name="671B", parameters=671e9, gpus=16384, stages=64, pipelines=32),
)

HOUR_LEAST = 0.91
"""ETTR of MoEvement that all models of figure 11 exceed at an MTBF of one hour."""

LARGEST, LARGEST_GEMINI = 0.86, 0.55
"""ETTR of the 671B model at an MTBF of ten minutes, with MoEvement and with Gemini."""

CONTRADICTIONS = (
    "Gemini at 10 min for DeepSeek-MoE is 0.47 (§1, figure 1b) and 0.728 (table 3)",
    "recovery is up to 31 times (CheckFreq) and 18 times (Gemini) faster in the text; table 3 has "
    "39 to 95 times and 13 to 36 times",
    "MoC slows DeepSeek-MoE down 4.7 times in the text; its ETTR of 0.134 means 7.5 times",
    "GPT-MoE with CheckFreq recovers for 4486 s at 30 min; its other rows grow by 237.3 s for each "
    "failure, which gives 5695 s",
    "appendix C multiplies two ratios; CheckFreq's rows of table 3 fit a sum, 1 - ETTR = overhead "
    "+ recovery / 12 h, and miss the product by up to 0.11",
    "Gemini's overhead is 11 to 15 % at 10 min in the text; table 3 leaves 12 to 18 %",
    "overhead is 1 to 2 % in table 7; its own ETTR leaves 1.5 to 5 %",
    "W of the third row of table 7 is 4; the rule that gives the four others gives 6",
    "Gemini's intervals in the last two rows of table 7 are up to 2 times off their own optimum",
    "recovery takes 10 to 14 s longer for each failure than the steps that are done again; the "
    "paper does not mention it",
    "figure 11 gives no step time, no window and no bandwidth, so that it can be matched but not "
    "predicted",
)
"""Where the paper disagrees with itself, or is silent; nothing is fitted to these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRecovery:
    """The time that one failure costs a system, as its authors print it."""

    system: str
    source: str
    gpus: int | None
    """GPUs of the experiment; None where the source does not give them beside the figure."""
    given: str
    """The figure in the source's terms."""
    cost_s: float | None
    """The figure in seconds; a bound where the source gives a bound. None: it gives no seconds."""


RECOVERIES = (
    PublishedRecovery(
        system="TrainMover",
        source="OSDI 2026, arXiv 2412.12636v3, abstract",
        gpus=1024,
        given="around 20 s of downtime",
        cost_s=20.0,
    ),
    PublishedRecovery(
        system="DeadPool",
        source="arXiv 2607.01646v1, abstract",
        gpus=512,
        given="recovery in under 40 s, no overhead",
        cost_s=40.0,
    ),
    PublishedRecovery(
        system="FFTrainer",
        source="arXiv 2512.03644v1, abstract",
        gpus=None,
        given="up to 98 % less than prior checkpoints",
        cost_s=None,
    ),
)
"""Systems that replace nodes while the job goes on. Their abstracts give these figures; none gives
an ETTR."""
