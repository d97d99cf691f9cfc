from pathlib import Path

import pytest
import yaml
from lab import parse_rate, read_specification
from lab.specification import SPECIFICATIONS, specification_from_content

from hetjax.errors import InputError
from hetjax.mesh import Cluster


def content(**changes):
    hosts = [{"name": "a", "cores": [0]}, {"name": "b", "cores": [1], "speed": 0.5}]
    hosts[1]["memory"] = "2 GB"
    links = [{"between": ["a", "b"], "bandwidth": "200 Mbit/s"}]
    return {"name": "two", "hosts": hosts, "links": links, **changes}


def refused(message, **changes):
    with pytest.raises(InputError, match=message):
        specification_from_content(content(**changes), "here")


def test_fields():
    spec = specification_from_content(content(), "here")
    assert spec.head.name == "a"
    assert [host.speed for host in spec.hosts] == [1.0, 0.5]
    assert [host.memory for host in spec.hosts] == [None, 2e9]
    assert spec.link("b-a") is spec.link("a-b")
    assert spec.link("a-b").bandwidth == 25e6
    assert spec.nodes == ["a", "b"]


def test_a_specification_survives_its_own_json():
    spec = specification_from_content(content(), "here")
    again = specification_from_content(spec.model_dump(mode="json"), "there")
    assert again == spec


@pytest.mark.parametrize(
    ("name", "hosts"), [("two_hosts", 2), ("three_hosts", 3), ("two_islands", 4)]
)
def test_ours(name, hosts):
    spec = read_specification(name)
    assert spec.name == name
    assert len(spec.hosts) == hosts
    assert {core for host in spec.hosts for core in host.cores} <= {0, 1}


@pytest.mark.parametrize("name", ["two_hosts", "three_hosts", "two_islands"])
def test_our_clusters_are_of_the_same_hosts_and_rates(name):
    spec = read_specification(name)
    cluster = Cluster.from_file(SPECIFICATIONS / "clusters" / f"{name}.yaml")
    assert [sub.ray_resource for sub in cluster.subclusters] == [
        f"host:{h.name}" for h in spec.hosts
    ]


def test_fields_that_are_wrong():
    refused(r"hosts\[0\]: unknown field 'core'; did you mean 'cores'", hosts=[{"core": 1}])
    refused(r"here: hosts\[0\].cores: the field is missing", hosts=[{"name": "a"}])
    refused(r"here: unknown field 'host'; did you mean 'hosts'", host=1)
    refused(r"name: 'Two' is not allowed", name="Two")
    hosts = content()["hosts"]
    refused("hosts: .* at least 2", hosts=hosts[:1])
    refused("hosts: .* at most 8", hosts=[{"name": f"h{i}", "cores": [0]} for i in range(9)])
    slow = {"name": "c", "cores": [0], "speed": 0.01}
    refused(
        r"hosts\[1\].speed: 0.01 is not allowed: it must be from 0.1 to 1", hosts=[hosts[0], slow]
    )
    small = {"name": "c", "cores": [0], "memory": "10 MB"}
    refused(
        r"hosts\[1\].memory: '10 MB' is not allowed: it must be 500 MB or more",
        hosts=[hosts[0], small],
    )


@pytest.mark.parametrize(
    ("links", "switches", "message"),
    [
        (["a-b", "a-b"], [], "host 'a' has 2 links"),
        (["a-q"], [], r"links\[0\].between: unknown host or switch 'q'"),
        (["a-s", "b-t"], ["s", "t"], "2 links join 2 of the 4, and 3 are wanted"),
        (["a-s", "b-t", "s-t", "t-s"], ["s", "t"], "4 links join 4 of the 4, and 3 are wanted"),
        (["a-b"], ["a"], "'a' is given twice"),
    ],
)
def test_shapes_that_are_wrong(links, switches, message):
    links = [{"between": link.split("-"), "bandwidth": 1e6} for link in links]
    refused(message, links=links, switches=switches)


def test_islands_are_allowed():
    links = [{"between": pair, "bandwidth": 1e6} for pair in (["a", "s"], ["b", "t"], ["s", "t"])]
    assert specification_from_content(content(links=links, switches=["s", "t"]), "here")


def test_unknown_names_are_answered_with_the_nearest():
    spec = specification_from_content(content(), "here")
    with pytest.raises(InputError, match="unknown link 'a-c'; did you mean 'a-b'"):
        spec.link("a-c")
    with pytest.raises(InputError, match=r"unknown host 'c'\. Allowed: a, b"):
        spec.host("c")
    with pytest.raises(InputError, match="unknown lab 'two_host'; did you mean 'two_hosts'"):
        read_specification("two_host")


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(InputError, match=r"no.yaml: the file cannot be read"):
        read_specification(tmp_path / "no.yaml")
    file = tmp_path / "wrong.yaml"
    file.write_text("hosts: [")
    with pytest.raises(InputError, match=r"wrong.yaml, line 1: this is not YAML"):
        read_specification(file)
    file.write_text(yaml.safe_dump([1]))
    with pytest.raises(InputError, match=r"wrong.yaml: the content: \[1\] is not allowed"):
        read_specification(file)


def test_rates():
    assert parse_rate("1gbit") == parse_rate("1 Gbit/s") == parse_rate(125e6) == 125e6
    assert parse_rate(None) is parse_rate("unlimited") is None
    for wrong in ("0.5mbit", "11 Gbit/s", "fast", 0, "-3mbit"):
        with pytest.raises(InputError, match=r"not allowed|not a number|unknown unit"):
            parse_rate(wrong)
