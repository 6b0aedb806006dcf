"""Ways in which users start a training, as data: name, files, command, and what Leto makes of it.

Every script starts the training of `entry_training.py`; `test_entry.py` runs each, kills it, and compares it with the
first one under plain `ddp`.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One way to start.

    Args:
        name: What a user would call it.
        files: Text of each file, by its path in the working directory.
        command: What follows the interpreter.
        status: "exact": survives kills bit for bit; "refused": an error says what to do.
        reason: Why it is as it is, or a part of the error's text.
        outs: Directories with what the trainings leave; `*` matches one part of a path that the run chooses.
        flavour: Lightning's distribution.
        kills: Rank, point and step of each kill of a training; each is one recovery.
        env: What is added to the environment.
    """

    name: str
    files: dict[str, str]
    command: tuple[str, ...]
    status: str = "exact"
    reason: str = "the script is run again by each trainer"
    outs: tuple[str, ...] = ("out",)
    flavour: str = "lightning.pytorch"
    kills: tuple[tuple[int, str, int], ...] = ((1, "forward", 2), (0, "chunk_updating", 5))
    env: dict[str, str] = field(default_factory=dict)


PLAIN = 'import sys\nfrom training import train\ntrain(strategy=sys.argv[1] if sys.argv[1:] else "leto")\n'

ARGPARSE = """
import argparse
from training import train
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--strategy", choices=["leto", "ddp"])
    arguments = parser.parse_args()
    train(arguments.out, strategy=arguments.strategy)
if __name__ == "__main__":
    main()
"""

ENVIRONMENT = """
import os
home = os.environ.pop("ENTRY_HOME")
import torch
path = os.environ["PATH"]
os.environ.clear()
os.environ["PATH"] = path
from training import train
train(strategy="leto_find_unused_parameters_true")
assert not any("LETO" in name or name in ("ENTRY_HOME", "LOCAL_RANK") for name in os.environ), sorted(os.environ)
"""

CHANGED = """
import os, sys
sys.argv = ["something else", "--entirely"]
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
import torch
from training import train
sys.argv[:] = []
train(strategy="leto")
assert os.path.basename(os.getcwd()) == "elsewhere" and sys.argv == []
"""

CLI = """
from training import FLAVOUR, Data, Model, report
from importlib import import_module
cli = import_module(FLAVOUR + ".cli").LightningCLI(Model, Data, {options})
{rest}
report(cli.trainer, cli.model, "out")
"""

CLI_CONFIG = """
seed_everything: 7
model: {{out: out}}
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 2
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: out
  logger: {{class_path: CSVLogger, init_args: {{save_dir: out, name: logs, version: 0}}}}
  callbacks:
  - {{class_path: ModelCheckpoint, init_args: {{dirpath: out/checkpoints, monitor: val, save_last: true}}}}
  {strategy}
"""

BY_CLASS = "strategy: {class_path: leto_strategy.LetoStrategy, init_args: {chunk_bytes: 256}}"

RUN = """
import sys
from training import train
train(*sys.argv[1:2], **({"strategy": sys.argv[2]} if sys.argv[2:] else {}))
"""

HYDRA = """
import logging
import hydra
from hydra.core.hydra_config import HydraConfig
log = logging.getLogger("app")
@hydra.main(config_path="conf", config_name="config", version_base=None)
def main(cfg):
    import os
    from training import Data, Model, options, pl, report
    log.info("begin %s", cfg.a)
    out = {out}
    with open(os.path.join(HydraConfig.get().runtime.output_dir, "saw.txt"), "a") as file:
        file.write(f"{{cfg.a}} {{cfg.stamp}} {{cfg.text}} {{os.getcwd()}} {{HydraConfig.get().job.name}}\\n")
    class Logging(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            log.info("step %d", trainer.global_step)
    pl.seed_everything(7, verbose=False)
    kwargs = options(out)
    kwargs["callbacks"].append(Logging())
    trainer, model = hydra.utils.instantiate(cfg.trainer, **kwargs, _convert_="object"), Model(out)
    trainer.fit(model, datamodule=Data())
    log.info("end")
    report(trainer, model, out)
if __name__ == "__main__":
    main()
"""

HYDRA_CONFIG = {
    "conf/config.yaml": "defaults: [{size: small}, _self_]\na: 1\ntext: none\nstamp: ${now:%H-%M-%S-%f}\n"
    "trainer: {_target_: lightning.pytorch.Trainer}\n",
    "conf/size/small.yaml": "n: 1\n",
    "conf/size/large.yaml": "n: 2\n",
}

ENTRIES = [
    Entry("script without a guard", {"train.py": PLAIN}, ("train.py",)),
    Entry("script with argparse and a guard", {"train.py": ARGPARSE}, ("train.py", "--out", "out", "--strategy=leto")),
    Entry(
        "python -m package.module",
        {"package/__init__.py": "", "package/train.py": ARGPARSE},
        ("-m", "package.train", "--out", "out", "--strategy=leto"),
    ),
    Entry(
        "interpreter options",
        {"train.py": ARGPARSE},
        ("-u", "-W", "ignore", "train.py", "--out", "out", "--strategy=leto"),
        reason="each trainer is a new interpreter with the same options",
        kills=((0, "ready", 3),),
    ),
    Entry(
        "environment made anew; strategy leto_find_unused_parameters_true",
        {"train.py": ENVIRONMENT},
        ("train.py",),
        reason="trainers begin with the environment of the script's own beginning",
        env={"ENTRY_HOME": "somewhere"},
    ),
    Entry(
        "sys.argv and working directory changed",
        {"train.py": CHANGED},
        ("train.py",),
        outs=("elsewhere/out",),
        reason="trainers begin where the script began",
    ),
    Entry(
        "LightningCLI, strategy by name",
        {"cli.py": CLI.format(options="", rest=""), "config.yaml": CLI_CONFIG.format(strategy="")},
        ("cli.py", "fit", "--config=config.yaml", "--trainer.strategy=leto"),
        reason="config.yaml is written by the user's process",
    ),
    Entry(
        "LightningCLI, strategy by class_path; pytorch_lightning",
        {"cli.py": CLI.format(options="", rest=""), "config.yaml": CLI_CONFIG.format(strategy=BY_CLASS)},
        ("cli.py", "fit", "--config=config.yaml"),
        reason="config.yaml is written by the user's process",
        flavour="pytorch_lightning",
    ),
    Entry(
        "LightningCLI, run=False and save_config_kwargs",
        {
            "cli.py": CLI.format(
                options='run=False, save_config_kwargs={"config_filename": "mine.yaml", "overwrite": True}',
                rest="cli.trainer.fit(cli.model, cli.datamodule)",
            ),
            "config.yaml": CLI_CONFIG.format(strategy="strategy: leto"),
        },
        ("cli.py", "--config=config.yaml"),
        reason="config.yaml is written by the user's process",
    ),
    Entry(
        "leto run script",
        {"train.py": RUN},
        ("-m", "leto_strategy", "run", "train.py", "out"),
        reason='a Trainer without a strategy gets "leto"',
    ),
    Entry(
        "leto run, LightningCLI without a strategy",
        {"cli.py": CLI.format(options="", rest=""), "config.yaml": CLI_CONFIG.format(strategy="")},
        ("-m", "leto_strategy", "run", "cli.py", "fit", "--config=config.yaml"),
        reason='the default of the parser is "auto"',
        kills=((1, "gradients", 3),),
    ),
    Entry(
        'leto run -m module, strategy="auto"; pytorch_lightning',
        {"package/__init__.py": "", "package/train.py": RUN},
        ("-m", "leto_strategy", "run", "-m", "package.train", "out", "auto"),
        reason='a Trainer with strategy="auto" gets "leto"',
        flavour="pytorch_lightning",
    ),
    Entry(
        "Hydra application, changing its directory",
        {"app.py": HYDRA.format(out='"out"'), **HYDRA_CONFIG},
        (
            "app.py",
            "+strategy=leto",
            "size=large",
            "text='it is, a {b} = \\'c\\''",
            "hydra.job.chdir=true",
            "hydra.run.dir=runs/${now:%f}",
        ),
        reason="trainers take the configuration of the job",
        outs=("runs/*/out",),
    ),
    Entry(
        "Hydra application as a module, zygote off",
        {"package/__init__.py": "", "package/app.py": HYDRA.format(out='"out"')}
        | {f"package/{name}": text for name, text in HYDRA_CONFIG.items()},
        ("-m", "package.app", "+strategy=leto", "trainer.strategy.zygote=off"),
        reason="trainers take the configuration of the job",
        kills=((1, "mid_after", 3),),
    ),
    Entry(
        "Hydra sweep, another --config-dir and --config-name",
        {
            "app.py": HYDRA.format(out='HydraConfig.get().runtime.output_dir + "/out"'),
            **HYDRA_CONFIG,
            "more/other.yaml": "defaults: [config, _self_]\ntext: other\n",
        },
        ("app.py", "-m", "--config-dir=more", "--config-name=other", "+strategy=leto", "a=1,2", "hydra.sweep.dir=s"),
        reason="trainers take the configuration of their job",
        outs=("s/0/out", "s/1/out"),
    ),
    Entry(
        "Hydra sweep with a parallel launcher",
        {
            "app.py": HYDRA.format(out='"out"'),
            **HYDRA_CONFIG,
            "hydra_plugins/parallel.py": "from hydra._internal.core_plugins.basic_launcher import BasicLauncher\n"
            "class Parallel(BasicLauncher):\n    pass\n",
        },
        ("app.py", "-m", "+strategy=leto", "a=1,2", "hydra.launcher._target_=hydra_plugins.parallel.Parallel"),
        status="refused",
        reason="use hydra/launcher=basic",
    ),
]
