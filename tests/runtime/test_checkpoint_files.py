import dataclasses
import json
import shutil

import pytest

from hetjax.errors import CheckpointError, InputError
from hetjax.runtime.checkpoints.checkpoint_files import (
    CheckpointFolder,
    StageRecord,
    read_manifest,
    record_files,
)
from hetjax.runtime.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    DataPosition,
    Manifest,
    SavedFile,
    SavedPart,
)
from hetjax.runtime.checkpoints.traced_model import TracedModel

DATA = DataPosition(40, 8, {"seed": 3, "share": 0.5})


def model(fingerprint):
    return TracedModel(2, lambda examples: fingerprint)


def write_stage(folder, stage=0, contents=b"weights"):
    """Write a stage's item as a worker would; returns its record."""
    item = f"stage_{stage}"
    (folder / item / "d").mkdir(parents=True)
    (folder / item / "d" / "data").write_bytes(contents * 100)
    (folder / item / "index").write_text("index")
    rows = (2 * stage, 2 * stage + 2)
    part = SavedPart("parameters", "w", *rows, (4, 3), "float32", item)
    return StageRecord("model", 2, (part,), record_files(folder, item))


def save(checkpoints, step, contents=b"weights"):
    target = checkpoints.begin(step)
    records = [write_stage(target, stage, contents) for stage in (1, 0)]
    return checkpoints.commit(step, [None, *records], DATA, {"stages": step})


@pytest.fixture
def checkpoints(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


def newest(checkpoints):
    found = checkpoints.newest_whole(model("model"))
    assert found is not None
    return found


def names(checkpoints):
    return sorted(entry.name for entry in checkpoints.path.iterdir())


def test_a_committed_checkpoint_is_found_with_its_metadata(checkpoints):
    assert checkpoints.newest_whole() is None
    assert checkpoints.steps() == ()
    path = save(checkpoints, 5)
    found = newest(checkpoints)
    assert (found.step, found.path, found.messages) == (5, path, ())
    assert (found.data, found.metadata) == (DATA, {"stages": 5})
    assert path.name == "00000005"


def test_the_manifest_lists_rows_files_and_checksums(checkpoints):
    manifest = json.loads((save(checkpoints, 5) / MANIFEST).read_text())
    assert [(p["item"], p["start"], p["stop"]) for p in manifest["parts"]] == [
        ("stage_0", 0, 2),
        ("stage_1", 2, 4),
    ]
    paths = [f"stage_{k}/{name}" for k in (0, 1) for name in ("d/data", "index")]
    assert [file["path"] for file in manifest["files"]] == paths
    assert manifest["files"][0]["num_bytes"] == 700


def test_a_manifest_survives_its_file():
    manifest = Manifest(
        3,
        "model",
        (SavedPart("optimizer", "0/count", 0, None, (), "int32", "stage_0"),),
        (SavedFile("stage_0/d", 10, 123),),
        DATA,
        {"2": [1.5, None], "10": "ü"},
    )
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([(0, None, (0, 2)), (0, None, (2, 3))], None),
        ([(0, 2), (2, 4, (0, 1)), (2, 4, (1, 3))], None),
        ([(0, None, (0, 2)), (0, None, (1, 3))], r"w\[0:4,0:2\] and .*w\[0:4,1:3\] have elements"),
        ([(0, None, (0, 2))], r"w\[0:4,0:2\] is a part of a leaf of which 4 elements are missing"),
        ([(0, None, (0, 2)), (0, None, (2, 4))], r"w\[0:4,2:4\] is no part of a leaf of shape"),
        ([(0, None, (0, 2), (0, 1))], r"is no part of a leaf of shape \[4, 3\]"),
        ([(0, None, (2, 1)), (0, None, (0, 3))], r"w\[0:4,2:1\] is no part of a leaf"),
    ],
)
def test_a_manifest_holds_every_element_once(parts, fault):
    saved = tuple(
        SavedPart("parameters", "w", start, stop, (4, 3), "float32", "stage_0", tuple(across))
        for start, stop, *across in parts
    )
    files = (SavedFile("stage_0/d", 10, 123),)
    manifest = Manifest(3, "model", saved, files, DATA)
    if fault is None:
        assert Manifest.from_json(manifest.to_json()) == manifest
    else:
        with pytest.raises(CheckpointError, match=fault):
            Manifest.from_json(manifest.to_json())


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def other_format(path):
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', '"format": 99'))


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("stage_1/d/data", truncate, "stage_1/d/data has 690 bytes, 700 expected"),
        ("stage_0/d/data", flip_a_bit, r"stage_0/d/data has checksum \w+, \w+ expected"),
        ("stage_0/index", lambda path: path.unlink(), "stage_0/index is missing"),
        ("stage_1", shutil.rmtree, "stage_1/d/data is missing"),
        (MANIFEST, lambda path: path.unlink(), "manifest.json is missing"),
        (MANIFEST, truncate, "manifest.json is not a whole manifest"),
        (MANIFEST, lambda path: path.write_text("[]"), "manifest.json is not a whole manifest"),
        (MANIFEST, flip_a_bit, r"manifest.json (does not match its checksum|is not|cannot be)"),
        (MANIFEST, other_format, f"manifest.json has format 99, {FORMAT} expected"),
    ],
)
def test_the_newest_whole_one_is_used_and_said(checkpoints, file, damage, reason):
    save(checkpoints, 150)
    damage(save(checkpoints, 200) / file)
    found = newest(checkpoints)
    assert found.step == 150
    (message,) = found.messages
    assert message.startswith("checkpoint 200 is not whole: ")
    assert message.endswith("; using 150")
    shutil.rmtree(checkpoints.path / "00000150")
    with pytest.raises(CheckpointError, match=f"^no checkpoint in .*: .* whole: {reason}"):
        checkpoints.newest_whole(model("model"))


def test_a_checkpoint_of_another_model_is_an_error(checkpoints):
    save(checkpoints, 5)
    with pytest.raises(CheckpointError, match=r"is 'model', this model's is 'other'"):
        checkpoints.newest_whole(model("other"))


def test_what_was_not_committed_leaves_the_others_alone(checkpoints):
    save(checkpoints, 5)
    write_stage(checkpoints.begin(10))  # and here the run ends
    again = CheckpointFolder(checkpoints.path)
    assert newest(again).step == 5
    again.begin(10)
    assert len(names(again)) == 2
    assert again._begun is not None
    assert not list(again._begun.iterdir())
    again.give_up()
    assert names(again) == ["00000005"]


def test_files_that_the_driver_does_not_see_are_not_committed(checkpoints):
    target = checkpoints.begin(5)
    records = [write_stage(target, stage) for stage in (0, 1)]
    shutil.rmtree(target / "stage_1")
    with pytest.raises(CheckpointError, match="stage_1/d/data is missing; all hosts"):
        checkpoints.commit(5, records, DATA, {})
    assert checkpoints.steps() == ()


def test_rows_that_are_missing_are_not_committed(checkpoints):
    target = checkpoints.begin(5)
    with pytest.raises(AssertionError, match="rows 2 to 3 are missing"):
        checkpoints.commit(5, [write_stage(target, 0)], DATA, {})


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, None, (60,)),
        (2, None, (50, 60)),
        (2, 20, (20, 40, 50, 60)),
        (9, 20, (10, 20, 30, 40, 50, 60)),
    ],
)
def test_the_keep_policy(tmp_path, keep_last, keep_every, kept):
    checkpoints = CheckpointFolder(tmp_path, keep_last=keep_last, keep_every=keep_every)
    for step in range(10, 70, 10):
        save(checkpoints, step)
    assert checkpoints.steps() == kept
    assert names(checkpoints) == [f"{step:08d}" for step in kept]


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="keep_last is 0; it must be 1 or more"):
        CheckpointFolder(tmp_path, keep_last=0)
    with pytest.raises(InputError, match="keep_every is 0; it must be 1 or more"):
        CheckpointFolder(tmp_path, keep_every=0)


def test_the_one_being_read_is_kept(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, keep_last=1)
    save(checkpoints, 10)
    with checkpoints.reading(10):
        save(checkpoints, 20)
        assert checkpoints.steps() == (10, 20)
    save(checkpoints, 30)
    assert checkpoints.steps() == (30,)


def test_broken_ones_push_out_no_whole_one(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, keep_last=2)
    save(checkpoints, 10)
    truncate(save(checkpoints, 40) / "stage_0/index")
    assert newest(checkpoints).step == 10
    save(checkpoints, 20)
    assert checkpoints.steps() == (10, 20, 40)
    save(checkpoints, 30)
    assert checkpoints.steps() == (20, 30, 40)
    save(checkpoints, 40)
    assert checkpoints.steps() == (30, 40)
    assert newest(checkpoints).messages == ()


def test_a_step_saved_again_replaces_the_old_one(checkpoints):
    save(checkpoints, 5)
    path = save(checkpoints, 5, b"others")
    assert (path / "stage_0/d/data").read_bytes() == b"others" * 100
    assert names(checkpoints) == ["00000005"]


@pytest.mark.parametrize("renamed", [False, True])
def test_an_interrupted_replacement_is_finished(checkpoints, renamed):
    path = save(checkpoints, 5)
    old = checkpoints.path / ".old-00000005"
    if renamed:
        shutil.copytree(path, old)
    else:
        path.rename(old)
    assert newest(checkpoints).step == 5
    assert names(checkpoints) == ["00000005"]


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_what_only_has_the_name_of_a_replaced_one_is_removed(checkpoints, kind):
    path = save(checkpoints, 5)
    old = checkpoints.path / ".old-00000005"
    if kind == "a file":
        old.write_text("no checkpoint")
    else:
        old.symlink_to(path)
    assert newest(checkpoints).step == 5
    assert save(checkpoints, 5, b"others") == path
    assert names(checkpoints) == ["00000005"]


def test_models_are_compared_before_files_are_read(checkpoints):
    path = save(checkpoints, 5)
    manifest = dataclasses.replace(read_manifest(path), model="other")
    (path / MANIFEST).write_text(manifest.to_json())
    (path / "stage_0/index").unlink()
    with pytest.raises(CheckpointError, match="another model"):
        checkpoints.newest_whole(model("model"))


def test_a_model_is_traced_as_it_was_when_its_state_was_saved(checkpoints):
    save(checkpoints, 5)

    def saved_for_two(examples):
        return "model" if examples == 2 else "of other equations"

    def untraceable(examples):
        if examples == 2:
            raise ValueError("cannot reshape")
        return "other"

    assert checkpoints.newest_whole(TracedModel(1, saved_for_two)) is not None
    assert checkpoints.newest_manifest(TracedModel(1, saved_for_two)) is not None
    for another in (lambda _: "other", untraceable):
        with pytest.raises(CheckpointError, match="another model"):
            checkpoints.whole(5, TracedModel(1, another))
