"""torchtitan's `train` in processes that stay when other ranks are lost.

    python -m holdfast.integrations.torchtitan_train --module llama3 --config llama3_8b …

The arguments are those of `python -m torchtitan.train`, without an override.
"""

from __future__ import annotations

from holdfast.integrations.torchtitan import start, train
from holdfast_core.packages import PackageGroup, needing

with needing("holdfast.integrations.torchtitan_train", PackageGroup.TORCHTITAN):
    from torchtitan.config import ConfigManager
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger


def main() -> None:
    """Train as the command line says."""
    init_logger()
    config = ConfigManager().parse_args()
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    world = start(config)
    trainer = config.build()
    try:
        train(trainer, world)
    finally:
        trainer.close()
    world.close()


if __name__ == "__main__":
    main()
