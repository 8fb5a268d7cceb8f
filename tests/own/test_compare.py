"""`jaxdiff compare`: equal budgets, one protocol, resumed, extended; on points with an MLP of a few units."""

import json
import math
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import own_files
import pytest
from training_runs import POINTS, config_of

from jaxdiff import compare, pages
from jaxdiff.cli import main
from jaxdiff.compare import report, settings, students
from jaxdiff.methods import METHODS
from jaxdiff.training import export, load_data, train
from jaxdiff.training.build import build
from jaxdiff.training.sampling import mesh_of

FEW = ["--budget=6e3", "--samples=32", "--nfe=1,2", "--solvers=euler", "--rates=0.5,1"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "teacher <b>"
    train(config_of(POINTS, {"train.steps": 4, "sample.timestamps": 4, "sample.batch_size": 32}), folder, quiet=True)
    return folder


def compared(teacher, workdir, methods, *more):
    return main(["compare", f"--teacher={teacher}", f"--methods={methods}", f"--workdir={workdir}", *FEW, *more])


@pytest.fixture(scope="module")
def results(teacher, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "MORE", ())
        patch.setattr(compare, "SCALES", (1.0, 2.0))
        assert compared(teacher, workdir, "sfd:2") == 0
        yield workdir


def read(workdir):
    return json.loads((workdir / "results.json").read_text())


def test_a_table_of_students_and_solvers(results):
    found = read(results)
    assert found["metric"] == "sliced_wasserstein"
    rows = {(row["sampler"], row["nfe"]): row for row in found["rows"] if row["guidance"] == 1.0}
    assert set(rows) == {("sfd:2", 2), ("euler", 1), ("euler", 2), ("teacher, heun", 7)}
    assert [row["nfe"] for row in found["rows"] if row["guidance"] == 2.0] == [14]  # the teacher, evaluated twice
    for row in rows.values():
        assert math.isfinite(row["quality"]) and row["to_teacher"] > 0 and row["images_per_second"] > 0
        assert 0 <= row["recall"] <= 1 and 0 <= row["precision"] <= 1
        assert row["protocol"]["samples"] == 32
    assert not rows["sfd:2", 2]["data"]
    lines = (results / "table.md").read_text().splitlines()
    assert len(lines) == 2 + len(found["rows"])


def test_students_have_equal_budgets(results):
    """The search and the student together cost the budget, up to the last step of each run."""
    for row in read(results)["rows"]:
        if row["trained"]:
            per_step = row["evaluations"] / row["steps"]
            spent = row["evaluations"] + sum(trial["steps"] for trial in row["tried"]) * per_step
            runs = 1 + len(row["tried"])
            assert 6000 - runs * per_step <= spent <= 6000 + runs * per_step
            assert {trial["rate"] for trial in row["tried"]} == {0.5 * row["recipe_rate"], row["recipe_rate"]}
            assert row["rate"] == min(row["tried"], key=lambda trial: trial["score"])["rate"]


def test_every_sampler_starts_from_the_same_noise(teacher, results):
    """One Euler step of the teacher, computed here from the noise of the sampler, is what the grid shows."""
    from jaxdiff.training.sampling import NOISE, _folded

    found = next(row for row in read(results)["rows"] if (row["sampler"], row["nfe"]) == ("euler", 1))
    config = export.read_config(teacher)
    shown = np.load(results / found["shown"])["images"]
    key = jax.random.key(config.eval.seed)
    unit = np.asarray(jax.vmap(lambda i: jax.random.normal(_folded(key, i, NOISE), (2,)))(np.arange(len(shown))))
    import jaxdiff

    saved = jaxdiff.load(teacher)
    labels = saved.sampler().sample(saved.params, len(shown), config.eval.seed)[1]
    x = jnp.asarray(config.sample.sigma_max * unit)
    expected = saved.denoiser(x, config.sample.sigma_max, {"label": jnp.asarray(labels)})
    np.testing.assert_allclose(shown, expected, rtol=2e-4, atol=2e-4)


class Page(HTMLParser):
    """The tags of a page, and whether each that needs closing is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_self_contained_and_escaped(results):
    text = (results / "report.html").read_text()
    made = Page(text)
    assert made.open == []
    assert "teacher &lt;b&gt;" in text and not any(tag == "b" for tag, _ in made.tags)
    assert not any("src" in attrs and not attrs["src"].startswith("data:") for _, attrs in made.tags)
    assert not any(tag in ("script", "link") for tag, _ in made.tags)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in made.tags
    assert sum(tag == "svg" for tag, _ in made.tags) >= 2
    assert (results / "quality_evaluations.svg").is_file() and (results / "quality_cost.svg").is_file()


def test_done_methods_are_skipped_and_others_added(teacher, results, monkeypatch):
    """Another seed of a method, and another method, here by a trainer that only counts."""
    before = {path: path.stat().st_mtime_ns for path in results.glob("*/seed*.json")}
    assert len(before) == 1
    asked = []

    def final(self, rate, seed):
        asked.append((self.made.method, seed))
        record = json.loads((results / "sfd" / "seed1.json").read_text())
        row = {**record["rows"][0], "nfe": self.made.nfe[0], "quality": 7.0}
        folder = self.folder / f"seed{seed}"
        folder.mkdir(parents=True)
        np.savez(folder / f"shown_{row['nfe']}.npz", images=np.zeros((3, 2)))
        return {**record, "rows": [row]}

    monkeypatch.setattr(students.Trainer, "search", lambda self: {"rate": 1.0, "recipe_rate": 1.0, "tried": []})
    monkeypatch.setattr(students.Trainer, "final", final)
    assert compared(teacher, results, "sfd:2,emd,consistency", "--seeds=2") == 0
    assert asked == [("sfd", 2), ("emd", 1), ("emd", 2), ("consistency", 1), ("consistency", 2)]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    rows = {row["sampler"]: row for row in read(results)["rows"] if row["trained"]}
    assert rows["consistency"]["data"] and not rows["emd"]["data"]
    first, second = rows["sfd:2"]["each"]["quality"]
    assert second == 7.0 and rows["sfd:2"]["quality"] == pytest.approx((first + 7.0) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if entry.recipe and name != "sfd"])
def test_every_method_is_trained(teacher, tmp_path, method):
    assert compared(teacher, tmp_path, method, "--rates=1") == 0
    rows = [row for row in read(tmp_path)["rows"] if row["trained"]]
    assert rows and all(math.isfinite(row["quality"]) for row in rows)


def test_another_protocol_in_the_same_folder_is_refused(teacher, results, capsys):
    assert main(["compare", f"--teacher={teacher}", f"--workdir={results}", "--budget=7e3", *FEW[1:]]) == 2
    assert "has results with budget='6000 evaluations'" in capsys.readouterr().err


def test_methods_that_do_not_apply_are_listed(tmp_path):
    """A teacher on the host, without data: no method that diffuses data, none that differentiates its teacher."""
    reference = own_files.write(tmp_path, "host")
    student = ["--config.model.name=mlp", "--config.model.fields.width=8", "--config.model.fields.depth=1"]
    assert compared(reference, tmp_path / "out", "consistency", *student, "--config.compile_cache=") == 0
    found = read(tmp_path / "out")
    assert "needs data" in found["not_compared"]["consistency"]
    assert found["reference"] == "the teacher's samples"
    assert all(row["quality"] == row["to_teacher"] for row in found["rows"])


def test_every_method_with_a_recipe_takes_part_by_default(monkeypatch, teacher, tmp_path):
    asked = []
    monkeypatch.setattr(compare, "compare", lambda config, settings, folder, edit: asked.append(settings))
    assert main(["compare", f"--teacher={teacher}", f"--workdir={tmp_path}"]) == 0
    assert list(asked[0].methods) == [name for name, entry in METHODS.items() if entry.recipe]


# ------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize(
    ("text", "expected"),
    [("300s", (300.0, "seconds")), ("5m", (300.0, "seconds")), ("2e6", (2e6, "evaluations")), ("10", (10.0, "evaluations"))],
)  # fmt: skip
def test_budgets(text, expected):
    budget = settings.Budget.read(text)
    assert (budget.amount, budget.unit) == expected


@pytest.mark.parametrize("text", ["", "0s", "ten", "5 d", "-3"])
def test_other_budgets_are_refused(text):
    with pytest.raises(ValueError, match="300s"):
        settings.Budget.read(text)


@pytest.mark.parametrize("rates", [(1.0,), (1.0, 2.0), (0.3, 1.0, 3.0), tuple(range(1, 9))])
def test_the_search_takes_its_share(rates):
    made = settings.Settings(("sfd",), settings.Budget.read("10s"), rates=tuple(map(float, rates)), search=0.3)
    found = settings.rungs(made)
    if len(rates) == 1:
        assert found == []
        return
    assert sum(count * share for count, share in found) == pytest.approx(0.3)
    assert found[0][0] == len(rates) and found[-1][0] == 2
    shares = [share for _, share in found]
    assert shares == sorted(shares)


def test_settings_are_checked():
    budget = settings.Budget.read("10s")
    with pytest.raises(ValueError, match="given twice"):
        settings.Settings(("sfd:1", "sfd:2"), budget)
    with pytest.raises(ValueError, match="share below 1"):
        settings.Settings(("sfd",), budget, search=1.0)


def test_a_diffusion_step_costs_two_to_three_evaluations_of_its_batch():
    """Forward, the gradient of every kernel, and that of every layer's input but for those that need none."""
    config = config_of(POINTS, {"model.fields.num_classes": 0})
    run = build(config, load_data(config))
    cost = students.evaluations_per_step(run, mesh_of(config)) / config.data.batch_size
    assert 2 < cost < 3


def test_plots_place_points_on_logarithmic_axes():
    svg = pages.plot([pages.Series("a & b", [(1.0, 10.0), (10.0, 1.0)])], "x", "y", {"<mark>": 2.0})
    found = [attrs for tag, attrs in Page(svg).tags if tag == "circle"]
    (x1, y1), (x2, y2) = ((float(c["cx"]), float(c["cy"])) for c in found[:2])
    assert x1 < x2 and y1 < y2  # down is larger in SVG
    assert "a &amp; b" in svg and "&lt;mark&gt;" in svg


def test_rows_over_seeds_are_means():
    seeds = [{"steps": 2, "seconds": s, "evaluations": 4, "parameters": 5, "rows": [{"nfe": 1, "quality": q}]}
             for s, q in ((1.0, 2.0), (3.0, 4.0))]  # fmt: skip
    (row,) = report.over_seeds(seeds)
    assert (row["quality"], row["seconds"], row["spread"]["quality"]) == (3.0, 2.0, pytest.approx(2**0.5))


def test_a_report_of_images_shows_the_same_noise_in_each_column(tmp_path):
    rows = []
    for i, name in enumerate(("sfd <2>", "teacher, heun")):
        images = np.full((3, 4, 4, 1), -1.0, np.float32)
        images[i] = 1.0  # white in column i
        np.savez(tmp_path / f"{i}.npz", images=images)
        row = {"sampler": name, "nfe": i + 1, "guidance": 1.0, "trained": i == 0, "quality": 2.0, "to_teacher": 1.0}
        row |= {"images_per_second": 9.0, "shown": f"{i}.npz", "data": True, "rate": 1e-3}
        rows.append(row | {"seconds": 3.0, "evaluations": 1e4, "parameters": 5})
    results = {"teacher": "runs/a&b", "metric": "fid", "reference": "data", "budget": "3 seconds", "search": 0.3}
    results |= {"rates": [1.0], "seeds": 1, "rows": rows, "not_compared": {"dmd2": "no <data>"}}
    report.write(tmp_path, results, lambda text: None)
    text = (tmp_path / "report.html").read_text()
    assert Page(text).open == []
    assert "a&amp;b" in text and "sfd &lt;2&gt;" in text and "no &lt;data&gt;" in text
    pixels, names = report.grid(tmp_path, rows)
    assert names == ["sfd <2>, 1 evaluations", "teacher, heun, 2 evaluations"]
    cells = pixels[4:-4, :, 0].reshape(-1, pixels.shape[1])
    assert (cells[8, 12], cells[8, 52]) == (255, 0) and (cells[52, 12], cells[52, 52]) == (0, 255)
    assert "data:image/png;base64," in text and (tmp_path / "grid.png").is_file()
