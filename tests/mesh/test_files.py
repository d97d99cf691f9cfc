import ast
from pathlib import Path

import pytest

import hetjax.mesh
from hetjax.errors import InputError
from hetjax.mesh import Cluster, Link, kind, measure_host_cpu

CONFIGS = Path(__file__).parents[2] / "configs" / "clusters"

GOOD = """\
name: pair
kinds:
  tired: {like: RTX3080, speed: 0.5, memory: 9 GB}
  own:
    peak_flops: {float32: 1 TFLOP/s, bfloat16: 2 TFLOPS}
    memory: 8 GiB
    memory_bandwidth: 100 GB/s
subclusters:
  - name: new
    kind: own
    nodes: 2
    devices_per_node: 2
    intra_node: {bandwidth: 25 GB/s, latency: 10 us}
    inter_node: {bandwidth: 10 Gbit/s, latency: 50 us}
    ray_resource: own
  - name: old
    kind: tired
    nodes: 1
    devices_per_node: 2
    intra_node: {bandwidth: 25e9, latency: 0}
  - name: oldest
    kind: T4
    nodes: 1
    devices_per_node: 1
    intra_node: {bandwidth: 1 GB/s, latency: 1e-6}
links:
  - {between: [new, old], bandwidth: 200 Mbit/s, latency: 0.5 ms}
default_link: {bandwidth: 1 MB/s, latency: 1 s}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_every_field(tmp_path):
    cluster = Cluster.from_file(write(tmp_path, GOOD))
    new, old, oldest = cluster.subclusters
    assert (cluster.name, new.nodes, new.devices_per_node, new.ray_resource) == (
        "pair",
        2,
        2,
        "own",
    )
    assert new.intra_node == Link(25e9, 1e-5)
    assert new.inter_node == Link(1.25e9, 5e-5)
    assert dict(new.kind.peak_flops) == {"bfloat16": 2e12, "float32": 1e12}
    assert (new.kind.memory_bytes, new.kind.memory_bandwidth) == (8 * 2**30, 1e11)
    assert old.inter_node == old.intra_node == Link(25e9, 0)
    assert old.kind.flops("bfloat16") == kind("RTX3080").flops("bfloat16") / 2
    assert old.kind.memory_bandwidth == kind("RTX3080").memory_bandwidth / 2
    assert old.kind.memory_bytes == 9 * 10**9
    assert oldest.kind == kind("T4")
    assert cluster.link("old", "new") == Link(25e6, 5e-4)
    assert cluster.link("old", "oldest") == cluster.link("new", "oldest") == Link(1e6, 1)
    assert Cluster.from_json_dict(cluster.to_json_dict()) == cluster


def test_what_a_person_measured_of_a_kind_is_read_and_kept(tmp_path):
    own = "tired: {like: RTX3080, product_shares: {bfloat16: 0.5}, product_source: mine, speed: 0.5"
    cluster = Cluster.from_file(
        write(tmp_path, GOOD.replace("tired: {like: RTX3080, speed: 0.5", own))
    )
    _, old, oldest = cluster.subclusters
    assert old.kind.product_efficiency("bfloat16") == 0.4
    assert (old.kind.product_source, old.kind.assumes_efficiency("float32")) == ("mine", True)
    assert oldest.kind.assumes_efficiency("float16")
    assert Cluster.from_json_dict(cluster.to_json_dict()) == cluster


def test_a_kind_like_another_reaches_the_same_share_of_its_peak(tmp_path):
    text = GOOD.replace("like: RTX3080", "like: H100")
    old = Cluster.from_file(write(tmp_path, text)).subclusters[1].kind
    assert old.product_efficiency("bfloat16") == kind("H100").product_efficiency("bfloat16")
    assert old.product_source == kind("H100").product_source


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_clusters_that_we_ship_are_read(path):
    cluster = Cluster.from_file(path)
    assert Cluster.from_json_dict(cluster.to_json_dict()) == cluster


def test_quickstart_is_the_same_cluster_on_every_machine():
    cluster = Cluster.from_file(CONFIGS / "quickstart.yaml")
    fast, slow = cluster.subclusters
    assert [each.num_devices for each in (fast, slow)] == [2, 4]
    assert {each.kind.platform for each in (fast, slow)} == {"cpu"}
    assert slow.kind.flops("float32") == fast.kind.flops("float32") / 2 == 20e9


def test_host_devices_share_their_host():
    cluster = Cluster.from_file(CONFIGS / "two_hosts.yaml")
    count = cluster.num_devices
    fastest = max(each.kind.flops("float32") for each in cluster.subclusters)
    assert fastest == measure_host_cpu(count).flops("float32")


def test_recorded_host_is_not_measured_again():
    data = Cluster.from_file(CONFIGS / "two_hosts.yaml").to_json_dict()
    data["kinds"]["host-cpu"]["peak_flops"] = {"float32": 123.0}
    assert Cluster.from_json_dict(data).subclusters[0].kind.flops("float32") == 123.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: T4", "kind: T5", r"subclusters\[2\]\.kind: unknown device kind 'T5'"),
        ("like: RTX3080", "like: RTX3081", r"kinds\.tired\.like: unknown .*did you mean 'RTX3080'"),
        (
            "nodes: 2",
            "nodes: 2\n    max_tensor_parallelism: 0",
            r"\[0\]\.max_tensor_parallelism: 0 is not allowed",
        ),
        (
            "nodes: 2",
            "nodes: 2\n    network_cards: 3",
            r"\[0\]\.network_cards: 3 is not allowed: a node has 2 device",
        ),
        (
            "nodes: 2",
            "nodes: 2\n    network_cards: [[0], [0, 1]]",
            r"network_cards: \[\[0\], \[0, 1\]\] is not allowed: each of the devices 0 to 1",
        ),
        (
            "nodes: 2",
            "nodes: 2\n    network_cards: [0, 1]",
            r"\[0\]\.network_cards: \[0, 1\] is not allowed: it must be a number of cards",
        ),
        (
            "nodes: 2",
            "nodes: 2\n    network_cards: [[0, 1], []]",
            r"and each card one device or more",
        ),
        ("nodes: 2", "nods: 2", r"subclusters\[0\]: unknown field 'nods'; did you mean 'nodes'"),
        ("speed: 0.5", "sped: 0.5", r"kinds\.tired: unknown field 'sped'; did you mean 'speed'"),
        ("default_link", "defaultlink", "yaml: unknown field 'defaultlink'; did you mean"),
        ("latency: 10 us", "latncy: 10 us", r"\[0\]\.intra_node: unknown field .*mean 'latency'"),
        (", latency: 1 s", "", r"default_link\.latency: the field is missing"),
        ("nodes: 2", "nodes: two", r"subclusters\[0\]\.nodes: 'two' is not allowed: .* integer"),
        ("nodes: 2", "nodes: '2'", r"subclusters\[0\]\.nodes: '2' is not allowed: .* integer"),
        ("nodes: 2", "nodes: 0", r"\.nodes: 0 is not allowed: .* greater than or equal to 1"),
        ("nodes: 2", "nodes: true", r"\.nodes: True is not allowed"),
        ("200 Mbit/s", "0", r"links\[0\]\.bandwidth: 0 is not allowed: it must be more than 0"),
        ("200 Mbit/s", "-5 MB/s", r"links\[0\]\.bandwidth: '-5 MB/s' is not allowed"),
        (
            "200 Mbit/s",
            "1e-299",
            r"links\[0\]\.bandwidth: .*1e-299 is not allowed; it must be from",
        ),
        (
            "200 Mbit/s",
            "1e299",
            r"links\[0\]\.bandwidth: .*1e\+299 is not allowed; it must be from",
        ),
        (
            "200 Mbit/s",
            "200 Mb/s",
            r"links\[0\]\.bandwidth: .* unknown unit 'Mb/s'. Allowed: .*bit/s",
        ),
        ("0.5 ms", "-0.5 ms", r"links\[0\]\.latency: '-0.5 ms' is not allowed: .*0 or more"),
        ("memory: 8 GiB", "memory: 8 Gigs", r"kinds\.own\.memory: .* unknown unit 'Gigs'"),
        ("    memory: 8 GiB\n", "", r"kinds\.own\.memory: it is missing: a kind is defined whole"),
        ("float32: 1 TFLOP/s, ", "", r"device kind 'own': peak_flops: 'float32' must be given"),
        ("like: RTX3080, speed", "speed", r"kinds\.tired\.peak_flops: it is missing"),
        ("speed: 0.5", "memory_bandwidth: 5", r"kinds\.tired\.memory_bandwidth: .*use 'speed'"),
        ("speed: 0.5", "speed: 0", r"kinds\.tired\.speed: 0 is not allowed"),
        ("speed: 0.5", "speed: .inf", r"kinds\.tired\.speed: inf is not allowed"),
        ("name: old\n", "name: new\n", r"subclusters\[1\]\.name: 'new' is given twice"),
        ("[new, old]", "[new, odl]", r"links\[0\]: unknown subcluster 'odl'; did you mean 'old'"),
        ("[new, old]", "[new]", r"links\[0\]\.between: .* at least 2 items"),
        ("[new, old]", "[new, new]", r"links\[0\]: 'new' is linked with itself"),
        ("default_link: {bandwidth: 1 MB/s, latency: 1 s}", "", "'new' and 'oldest' have no link"),
        (
            "    inter_node: {bandwidth: 10 Gbit/s, latency: 50 us}\n",
            "",
            r"\[0\]\.inter_node: .*miss",
        ),
        ("latency: 10 us}\n", "latency: 10 us\n", r"cluster\.yaml, line 1\d: this is not YAML"),
        ("  own:\n", "  tired:\n", r"line 4: this is not YAML: the key 'tired' is given twice"),
        ("name: pair", "name: 2024-99-99", "this is not YAML: month must be in 1..12"),
        ("name: pair", "name: 5", "name: 5 is not allowed: Input should be a valid string"),
    ],
)
def test_each_mistake_gives_one_clear_line(tmp_path, old, new, message):
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(InputError, match=message) as caught:
        Cluster.from_file(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_content_that_is_no_mapping_is_refused(tmp_path, text):
    with pytest.raises(InputError, match=r"the content: .* must be a mapping"):
        Cluster.from_file(write(tmp_path, text))


def test_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.yaml: .* cannot be read: No such file"):
        Cluster.from_file(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        Cluster.from_file(tmp_path)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: café".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.yaml: the text is not UTF-8, from byte 9 on"):
        Cluster.from_file(path)


def test_no_module_imports_jax_or_ray_before_it_is_needed():
    (folder,) = hetjax.mesh.__path__
    for path in Path(folder).glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not {"jax", "ray"} & set(ast.unparse(node).replace(".", " ").split()), path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes: 2", "nodes: 010", r"line 11: .*'010' is not written in decimal alone"),
        ("nodes: 2", "nodes: 1:30", r"'1:30' is not written in decimal alone"),
        ("nodes: 2", "nodes: 1_0", r"'1_0' is not written in decimal alone"),
        ("nodes: 2", f"nodes: {'9' * 6000}", "a number has 6000 digits, 32 at most"),
        ("nodes: 2", "nodes: 10001", r"nodes: 10001 is not allowed: .* 10000"),
        ("devices_per_node: 2", "devices_per_node: 100000", r"100000 is not allowed: .* 1024"),
        ("name: pair", "name: !!bool x", r"the tag tag:yaml\.org,2002:bool is not allowed"),
        ("name: pair", "name: &a [*a]", "stands inside of what it stands for"),
        ("name: pair", 'name: "a\\eb"', r"name: .* has the invisible character U\+001B"),
        ("name: new\n", 'name: "n\\u202ew"\n', r"\.name: .* the invisible character U\+202E"),
        ("name: pair", "{[]: 1}: 2\nname: pair", "a key must be a text or a number"),
        ("name: pair", f"name: {'[' * 500}{']' * 500}", "nested more than 32 levels deep"),
    ],
)
def test_what_would_be_guessed_or_has_no_end_is_refused(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(InputError, match=message):
        Cluster.from_file(write(tmp_path, GOOD.replace(old, new, 1)))


def test_aliases_stand_for_little(tmp_path):
    shared = GOOD.replace(
        "intra_node: {bandwidth: 25 GB/s", "intra_node: &near {bandwidth: 25 GB/s"
    )
    shared = shared.replace("{bandwidth: 25e9, latency: 0}", "*near")
    old = Cluster.from_file(write(tmp_path, shared)).subcluster("old")
    assert old.intra_node == Link(25e9, 1e-5)
    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(30)
    )
    with pytest.raises(InputError, match="more than 30000 values"):
        Cluster.from_file(write(tmp_path, bomb))


@pytest.mark.parametrize("said", ["2", "[[0], [1]]"])
def test_network_cards_are_counted_or_told_device_by_device(tmp_path, said):
    text = GOOD.replace("nodes: 2", f"nodes: 2\n    network_cards: {said}", 1)
    cluster = Cluster.from_file(write(tmp_path, text))
    assert cluster.subclusters[0].network_cards == ((0,), (1,))
    assert cluster.subclusters[0].num_cards == 2
    assert Cluster.from_json_dict(cluster.to_json_dict()) == cluster


def test_a_limit_of_tensor_parallelism_is_kept(tmp_path):
    text = GOOD.replace("nodes: 2", "nodes: 2\n    max_tensor_parallelism: 1", 1)
    cluster = Cluster.from_file(write(tmp_path, text))
    part = cluster.subclusters[0]
    assert (part.allows_tensor_axis(1), part.allows_tensor_axis(2)) == (True, False)
    assert Cluster.from_json_dict(cluster.to_json_dict()) == cluster
