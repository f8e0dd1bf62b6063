"""Bad input gets an error that names the argument, the value and what is allowed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_accel import AccelError, AccelPlugin, AccelWarning
from support.lightning_models import Supervised, Transformer, cnn, footprint, images, mlp, tokens, vectors

MakeTrainer = Callable[..., Any]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "32-true"])
def test_precision_given_to_trainer_and_plugin_names_both(make_trainer: MakeTrainer, precision: Any) -> None:
    with pytest.raises(ValueError, match=rf"precision={precision}.*AccelPlugin\(precision='auto'\)"):
        make_trainer(precision=precision, plugins=[AccelPlugin()])


def test_two_plugins_are_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(MisconfigurationException, match="multiple values for Precision"):
        make_trainer(plugins=[AccelPlugin(), AccelPlugin()])


@pytest.mark.parametrize(
    ("settings", "given", "allowed"),
    [
        ({"precision": "bf16"}, "precision='bf16'", "'bf16-mixed'"),
        ({"techniques": {"memory_format": "channel_last"}}, "memory_format='channel_last'", "'channels_last'"),
        ({"memory": {"checkpoint": "ful"}}, "memory.checkpoint='ful'", "did you mean 'full'?"),
        ({"compile": "max"}, "compile='max'", "'max-autotune'"),
        ({"techniques": {"flash_attention": "spda"}}, "flash_attention='spda'", "did you mean 'sdpa'?"),
        ({"memory": {"offload": "ram"}}, "memory.offload='ram'", "'host'"),
        ({"memory": {"pack": "full"}}, "memory.pack='full'", "'auto', 'off'"),
        ({"techniques": {"inplace_activations": "yes"}}, "inplace_activations='yes'", "'off'"),
        ({"memory": "much"}, "memory='much'", "'12GiB'"),
        ({"trust": "mesured"}, "trust='mesured'", "did you mean 'measured'?"),
    ],
)
def test_an_unknown_value_names_argument_value_and_what_is_allowed(settings: Any, given: str, allowed: str) -> None:
    with pytest.raises(ValueError, match="Allowed") as caught:
        AccelPlugin(**settings)
    assert given in str(caught.value)
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_switch_that_is_no_boolean_is_refused() -> None:
    with pytest.raises(TypeError, match=r"strict='yes'.*True, False"):
        AccelPlugin(strict="yes")  # type: ignore[arg-type]


def test_a_technique_that_is_misspelt_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'flash_atention'; did you mean 'flash_attention'"):
        AccelPlugin(techniques={"flash_atention": "off"})


def test_checkpointing_a_model_without_blocks_says_how_to_name_some(make_trainer: MakeTrainer) -> None:
    module = Supervised(mlp())
    before = footprint(module)
    trainer = make_trainer(plugins=[AccelPlugin(memory={"checkpoint": "full"})])
    with pytest.raises(ValueError, match=r"memory.checkpoint='full'.*no repeated blocks.*blocks="):
        trainer.fit(module, vectors())
    assert footprint(module) == before


def test_a_block_path_that_matches_nothing_names_the_nearest(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(memory={"checkpoint": "full", "blocks": ["Blok"]})
    module = Supervised(Transformer())
    before = footprint(module)
    with pytest.raises(ValueError, match=r"No block matches 'Blok'.*did you mean 'Block'"):
        make_trainer(plugins=[plugin]).fit(module, tokens())
    assert footprint(module) == before


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *a, **k: None if "g++" in str(name) else which(name, *a, **k))


@pytest.mark.usefixtures("no_compiler")
def test_compile_without_a_compiler_warns_and_trains(make_trainer: MakeTrainer) -> None:
    module = Supervised(Transformer())
    plugin = AccelPlugin(compile="on")
    with pytest.warns(AccelWarning, match=r"compile: .*C\+\+ compiler.*apt-get install"):
        make_trainer(plugins=[plugin]).fit(module, tokens())
    assert len(module.losses) == 4
    assert any("compile" in note for note in plugin.report.notes)


@pytest.mark.usefixtures("no_compiler")
def test_compile_without_a_compiler_is_an_error_when_strict(make_trainer: MakeTrainer) -> None:
    module = Supervised(Transformer())
    before = footprint(module)
    with pytest.raises(AccelError, match=r"C\+\+ compiler.*strict=True"):
        make_trainer(plugins=[AccelPlugin(compile="on", strict=True)]).fit(module, tokens())
    assert footprint(module) == before


def test_channels_last_without_convolutions_warns(make_trainer: MakeTrainer) -> None:
    with pytest.warns(AccelWarning, match="memory_format was asked for and found no site"):
        make_trainer(plugins=[AccelPlugin(techniques={"memory_format": "channels_last"})]).fit(
            Supervised(mlp()), vectors()
        )


def test_channels_last_without_convolutions_is_an_error_when_strict(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(techniques={"memory_format": "channels_last"}, strict=True)
    with pytest.raises(AccelError, match="memory_format was asked for and found no site"):
        make_trainer(plugins=[plugin]).fit(Supervised(mlp()), vectors())


def test_a_strict_plugin_trains_where_nothing_is_amiss(make_trainer: MakeTrainer) -> None:
    module = Supervised(cnn())
    make_trainer(plugins=[AccelPlugin(precision="32-true", strict=True)]).fit(module, images())
    assert len(module.losses) == 4


def test_a_strategy_with_a_precision_of_its_own_says_so_itself(make_trainer: MakeTrainer) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match="FSDP"):
        make_trainer(strategy=FSDPStrategy(), plugins=[AccelPlugin()])


def test_a_model_whose_own_code_fails_raises_its_own_error(make_trainer: MakeTrainer) -> None:
    class Wrong(Supervised):
        def loss(self, batch: Any) -> Any:
            return self.net(batch[0]) @ nn.Linear(7, 9).weight

    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        make_trainer(plugins=[AccelPlugin(techniques={"memory_format": "channels_last"})]).fit(Wrong(cnn()), images())
