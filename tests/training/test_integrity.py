"""Nothing damaged is read in silence: checkpoints, exports and records of a run are verified."""

import json
import logging
import os
import shutil
import stat

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from training_runs import POINTS, assert_same_bits, config_of, saved_state

import jaxdiff
from jaxdiff.data import spec
from jaxdiff.errors import raised_on_purpose
from jaxdiff.training import backends, checkpoint, export, trainer
from jaxdiff.training.checkpoint import CheckpointError, Checkpoints
from jaxdiff.training.logs import Logger
from jaxdiff.weights import files

ONE = jax.devices()[:1]
QUICK = {"train.steps": 6, "sample.count": 0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    trainer.train(config_of(POINTS, QUICK), workdir, quiet=True, devices=ONE)
    return workdir


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def flip(path, byte, bit=0):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(bytes(content))


# ------------------------------------------------------------------------------------------ checkpoints


def test_a_flipped_bit_in_the_arrays_of_a_checkpoint(run):
    """Wherever it is: the state is the one that was saved, or the checkpoint is refused by name."""
    whole, errors = saved_state(run, 6), []
    stored = (run / "checkpoints" / "6" / "default" / "ocdbt.process_0" / "d").iterdir()
    file = max(stored, key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    for byte in range(0, size, size // 5):
        flip(file, byte, 3)
        try:
            assert_same_bits(saved_state(run, 6), whole)
        except CheckpointError as error:
            errors.append(str(error))
        flip(file, byte, 3)
    assert errors and all(f"the checkpoint {run}/checkpoints/6 cannot be read" in error for error in errors)
    assert all("to resume from step 3" in error for error in errors)


def test_contents_that_differ_from_the_digest(run, monkeypatch):
    """As after damage that the format does not notice."""
    real = checkpoint.state_digest
    monkeypatch.setattr(checkpoint, "state_digest", lambda state: real(state)[::-1])
    with pytest.raises(CheckpointError, match=r"checkpoints/6 .*do not match its checksum.*to resume from step 3"):
        trainer.train(config_of(POINTS, {"train.steps": 9}), run, quiet=True, devices=ONE)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_checkpoint_under_another_name(run, recorded, monkeypatch):
    folder = run / "checkpoints"
    if not recorded:  # by an earlier version
        monkeypatch.setattr(Checkpoints, "_record", lambda self, step: {})
    shutil.copytree(folder / "6", folder / "8")
    with pytest.raises(CheckpointError, match=r"checkpoints/8 holds step 6: .*renamed or copied.*from step 6"):
        trainer.train(config_of(POINTS, {"train.steps": 9}), run, quiet=True, devices=ONE)


def test_a_checkpoint_of_an_earlier_version_is_read(run):
    whole = saved_state(run, 6)
    path = run / "checkpoints" / "6" / "_CHECKPOINT_METADATA"
    record = json.loads(path.read_text())
    assert record["custom_metadata"].pop(checkpoint.RECORD)["step"] == 6
    path.write_text(json.dumps(record))
    assert_same_bits(saved_state(run, 6), whole)


def test_a_damaged_record(run):
    path = run / "checkpoints" / "6" / "_CHECKPOINT_METADATA"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(CheckpointError, match="checkpoints/6 cannot be read"):
        saved_state(run, 6)


def test_metrics_that_were_changed(tmp_path):
    """The best checkpoint is the one that is kept and sampled: its rank is verified too."""
    checkpoints = Checkpoints(tmp_path, metric="fid")
    for step, value in ((1, 2.0), (2, 3.0)):
        checkpoints.save(step, {"params": jax.numpy.ones(3)}, {"fid": value})
    checkpoints.wait()
    assert checkpoints.best() == 1
    checkpoints.close()
    (path,) = (tmp_path / "2" / "metrics").glob("metrics")
    path.write_text(path.read_text().replace("3.0", "1.0"))
    with pytest.raises(CheckpointError, match=r"2 cannot be read .*metrics"):
        Checkpoints(tmp_path, metric="fid")


def test_a_checkpoint_of_another_dtype(run):
    config = config_of(POINTS, {"optim.options": {"mu_dtype": "bfloat16"}})
    with pytest.raises(CheckpointError, match=r"mu/.* is float32, expected bfloat16"):
        saved_state(run, 6, config)


# ------------------------------------------------------------------------------------------ exports


def test_flipped_bits_of_an_export(run):
    """Of the header and of the arrays: the same parameters, or an error for the user."""
    path = run / export.FILE
    whole, errors = files.read(path), []
    size = path.stat().st_size
    for byte in [*range(0, 1500, 29), *range(1500, size, size // 40)]:
        flip(path, byte, byte % 8)
        try:
            assert_same_bits(export.read_arrays(path), whole)
        except ValueError as error:
            errors.append(error)
        flip(path, byte, byte % 8)
    assert len(errors) > 40
    assert all(raised_on_purpose(error) and str(path) in str(error) for error in errors)


def cut(path, share):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
def test_a_truncated_export(run, share):
    cut(run / export.FILE, share)
    with pytest.raises(ValueError, match=r"export\.safetensors is damaged or truncated"):
        assert jaxdiff.load(run, devices=ONE).params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.astype(np.float64), r"kernel is float64, exported parameters are float32, bfloat16, float16"),
        (lambda a: a.astype(np.int8), r"kernel is int8"),
        (lambda a: a.astype(np.float32) * np.nan, r"kernel has NaN or infinite values"),
        (lambda a: a + np.inf, r"kernel has NaN or infinite values"),
    ],
)
def test_parameters_that_are_not_finite_floats(run, change, message):
    """In a file of another writer, which has no checksum."""
    path = run / export.FILE
    arrays = load_file(path)
    name = next(name for name in arrays if name.endswith("kernel"))
    save_file({**arrays, name: change(arrays[name])}, path)
    with pytest.raises(ValueError, match=message):
        jaxdiff.load(run, devices=ONE).sample(0, 2)


def test_an_export_without_a_checksum_is_read(run):
    before = export.read_arrays(run)
    save_file(load_file(run / export.FILE), run / export.FILE, {"step": "6"})
    assert_same_bits(export.read_arrays(run), before)
    assert export.read_step(run) == 6


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_of_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        files.write(tmp_path / "a.safetensors", {"x": np.ones(3, np.float32)})
        files.write(tmp_path / "a.npz", {"x": np.ones(3, np.float32)})
        export.write_config(tmp_path, config_of())
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "a.safetensors", "config.json"]


def test_a_full_disk_is_one_line(run, monkeypatch):
    before = (run / export.FILE).read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(
        OSError, match=r"^cannot write .*export\.safetensors: No space left on device; free some space$"
    ):
        export.write(run, {"x": np.ones(3)})
    assert (run / export.FILE).read_bytes() == before and not list(run.glob(".*part*"))


def test_orbax_logs_to_a_file(tmp_path, capsys):
    """Not to the console, where hundreds of lines would surround the message."""
    log = logging.getLogger("absl")
    before = log.level, log.propagate, list(log.handlers)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    log.error("no space left")
    checkpoints.close()
    assert "ERROR no space left" in (tmp_path / "orbax.log").read_text()
    assert not capsys.readouterr().err and (log.level, log.propagate, list(log.handlers)) == before


def test_a_disk_that_fills_up_under_tensorboard(tmp_path):
    """Its thread goes on, so that nothing waits for it; the next log line says why the run ends."""
    log = Logger(tmp_path, quiet=True)
    writer = log._backends[backends.DEFAULT.index("tensorboard")]._writer
    events = writer.file_writer.event_writer._ev_writer

    def full():
        raise OSError(28, "No space left on device")

    events.writer.flush = full
    writer.file_writer.flush()
    with pytest.raises(OSError, match=r"cannot write .*tensorboard: .*No space left on device\. Rerun the command"):
        log.scalars(1, {"loss": 1.0})
    for step in range(30):  # more than its queue holds
        writer.add_scalar("loss", 1.0, step)
    log.close()


# ------------------------------------------------------------------------------------------ records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is damaged or truncated"),
        ("[]", "must hold a JSON object, got list"),
        ("null", "must hold a JSON object, got NoneType"),
        ("{}", "not the whole config of a run: it has no data, model"),
        ('{"format": 2}', "not the whole config"),
        ('{"method": 3}', "not the whole config"),
        (b"\xff\xfe{}", "is damaged or truncated"),
    ],
)
def test_a_config_that_is_not_one(run, content, message):
    path = run / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        jaxdiff.load(run, devices=ONE)
    assert str(path) in str(caught.value)


def test_a_config_of_a_later_format(run):
    path = run / "config.json"
    record = json.loads(path.read_text())
    del record["checksum"]
    path.write_text(json.dumps({**record, "format": 9}))
    with pytest.raises(ValueError, match="has format 9, this version of jaxdiff reads"):
        jaxdiff.load(run, devices=ONE)


@pytest.mark.parametrize("name", ["config.json", spec.FILE])
def test_an_edited_record(run, name):
    """A digit changes what is sampled; without the checksum the edit is meant."""
    path = run / name
    text = path.read_text()
    old, new = ('"timestamps": 3', '"timestamps": 5') if name == "config.json" else ('"size": 1000', '"size": 3000')
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=r'does not match its checksum.*remove the line "checksum"'):
        jaxdiff.load(run, devices=ONE)
    record = json.loads(path.read_text())
    del record["checksum"]
    path.write_text(json.dumps(record))
    changed = jaxdiff.load(run, devices=ONE)
    assert changed.config.sample.timestamps == 5 if name == "config.json" else changed.run.data.size == 3000


def test_data_json_without_a_field(run):
    (run / spec.FILE).write_text('{"name": "x"}')
    with pytest.raises(ValueError, match=r"data\.json has no shape, size"):
        jaxdiff.load(run, devices=ONE)
