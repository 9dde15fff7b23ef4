"""Models of transformers that have a ``logit_scale``, or lie in channels_last."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.harness import EngineTrainer, Options, World, applied, build_engine, parameters, stock
from tests.harness.models import batch

pytest.importorskip("transformers", reason="transformers is not installed: `test` has it")

import transformers

PATCH = "parameter_layouts"
pytestmark = stock.since("0.19.8", "a broadcast of bytes")

LAYERS: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TEXT = LAYERS | {"vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 31}
TEXT |= {"bos_token_id": 30, "pad_token_id": 29, "sep_token_id": 31}
SEEN = LAYERS | {"image_size": 8, "patch_size": 4}
SETTINGS = {"text_config": TEXT, "vision_config": SEEN, "projection_dim": 8}


def clip() -> Any:
    return transformers.CLIPModel(transformers.CLIPConfig(**SETTINGS))


class Pairs(nn.Module):
    """Which text belongs to which image: its loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, ids: Tensor, pixels: Tensor) -> Any:
        return self.model(input_ids=ids, pixel_values=pixels, return_loss=True).loss


def pairs(trainer: Any, step: int) -> None:
    """Other ones on each rank."""
    ids, pixels = (batch(step, kind, 2 * size)[0].view(2, -1) for kind, size in ((0, 8), (1, 192)))
    ids[:, -1] = 31  # CLIP looks for the end
    trainer.backward(trainer(ids, pixels.view(2, 3, 8, 8).to(trainer.options.torch_dtype) / 12))


def made_under_zero3(folder: Path, *patches: str) -> Any:
    """The ``logit_scale`` of a CLIP that is loaded, and of one made anew; both take a step."""
    from transformers.integrations import HfDeepSpeedConfig

    options, scales = Options(3), []
    with applied(*patches):
        settings = HfDeepSpeedConfig(options.config)
        try:
            loaded = transformers.CLIPModel.from_pretrained(folder)
            anew = transformers.CLIPModel._from_config(loaded.config)
            for model in (loaded, anew):
                scales.append(parameters(model)["logit_scale"].item())
                trainer = EngineTrainer(build_engine(Pairs(model), options.config), options)
                pairs(trainer, 0)
                trainer.step()
                moved = parameters(model)["logit_scale"].item()
                assert moved != scales[-1]
        except RuntimeError as error:
            return str(error)
        finally:
            del settings
    return scales


def test_what_transformers_makes_in_zero_init(world: World, tmp_path: Path) -> None:
    model = clip()
    model.logit_scale.data.fill_(1.25)
    model.save_pretrained(tmp_path)
    assert all("cannot be 0 to view" in error for error in world.run(made_under_zero3, tmp_path))
    initial = model.config.logit_scale_init_value
    for scales in world.run(made_under_zero3, tmp_path, PATCH):
        assert scales == pytest.approx([1.25, initial])
