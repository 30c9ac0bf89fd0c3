"""diffusers-legacy-model: a Transformer2DModel that has no newer class."""

from __future__ import annotations

import threading

import pytest

from diffusers_quantfix.verify.models import vq

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

LOAD, CONFIG = "diffusers-legacy-model-load", "diffusers-legacy-model-config"
SHOWS = "maximum recursion depth exceeded"


def assert_same(again, model) -> None:
    """Equal weights, which lie at other addresses if they come from a file: on some processors the last bit of a
    product depends on that."""
    weights = model.state_dict()
    assert again.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())
    assert torch.allclose(vq.predict(again), vq.predict(model), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"low_cpu_mem_usage": False}], ids=["", "low_cpu_mem_usage=False"])
@pytest.mark.defect(LOAD, shows=SHOWS)
@pytest.mark.defect(CONFIG, shows=SHOWS)
def test_it_is_loaded(tmp_path, options):
    from diffusers import Transformer2DModel

    model = vq.transformer()
    model.save_pretrained(tmp_path / "sub")
    for arguments in ({"subfolder": "sub"}, {"subfolder": "sub", "torch_dtype": torch.float32}):
        again = Transformer2DModel.from_pretrained(str(tmp_path), **arguments, **options)
        assert type(again) is Transformer2DModel
        assert_same(again, model)
    again, info = Transformer2DModel.from_pretrained(tmp_path / "sub", output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert_same(again, model)


@pytest.mark.defect(LOAD, shows=SHOWS)
@pytest.mark.defect(CONFIG, shows=SHOWS)
def test_threads_load_it(tmp_path):
    from diffusers import Transformer2DModel

    model = vq.transformer()
    model.save_pretrained(tmp_path)
    found: list = []

    def load():
        try:
            # otherwise it changes torch.nn.Module for all threads
            found.append(Transformer2DModel.from_pretrained(tmp_path, low_cpu_mem_usage=False))
        except RecursionError as error:
            found.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one for one in found if isinstance(one, RecursionError)]
    if errors:
        raise errors[0]
    assert len(found) == 3
    for one in found:
        assert_same(one, model)


@pytest.mark.defect(CONFIG, shows=SHOWS)
def test_it_is_made_from_its_config():
    from diffusers import Transformer2DModel

    model = vq.transformer()
    for config in (model.config, dict(model.config)):
        again = Transformer2DModel.from_config(config)
        assert type(again) is Transformer2DModel
        again.load_state_dict(model.state_dict())
        assert_same(again.eval(), model)
    again, _ = Transformer2DModel.from_config(dict(model.config), return_unused_kwargs=True)
    assert type(again) is Transformer2DModel


def test_a_dit_gets_its_class(tmp_path):
    from diffusers import DiTTransformer2DModel, Transformer2DModel

    torch.manual_seed(0)
    DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=4, patch_size=2,
        num_embeds_ada_norm=10, out_channels=4, norm_num_groups=2,
    ).save_pretrained(tmp_path)  # fmt: skip
    for _ in range(2):
        model = Transformer2DModel.from_pretrained(tmp_path)
        assert type(model) is DiTTransformer2DModel
        assert type(Transformer2DModel.from_config(model.config)) is DiTTransformer2DModel


def test_an_error_is_forgotten(tmp_path):
    from diffusers import Transformer2DModel

    (tmp_path / "config.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(KeyError, match="norm_type"):
            Transformer2DModel.from_pretrained(tmp_path)
        with pytest.raises(KeyError, match="norm_type"):
            Transformer2DModel.from_config({})
