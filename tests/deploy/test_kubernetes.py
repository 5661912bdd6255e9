"""The Kubernetes examples, as far as they can be held to anything without a cluster: Kubernetes' published schemas, and
what the parts of an example say of each other."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "kubernetes"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
PORTS = {"triton": {"http": 8000, "grpc": 8001, "metrics": 8002}, "trtdet-serve": {"http": 8080, "admin": 8081}}
LIVE = ("startupProbe", "livenessProbe")
HEALTH = {
    "triton": {**dict.fromkeys(LIVE, "/v2/health/live"), "readinessProbe": "/v2/health/ready"},
    "trtdet-serve": {**dict.fromkeys(LIVE, "/healthz"), "readinessProbe": "/readyz"},
}
QUEUE = {"triton": "nv_inference_pending_request_count", "trtdet-serve": "trtdet_queue_images"}

Document = dict[str, Any]


def documents(path: Path) -> dict[str, Document]:
    """The parts of an example by kind; each kind is there once."""
    found = [part for part in yaml.safe_load_all(path.read_text()) if part is not None]
    kinds = [part["kind"] for part in found]
    assert len(set(kinds)) == len(kinds)
    return dict(zip(kinds, found, strict=True))


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request):
    return request.param.stem, documents(request.param)


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES} == set(PORTS)


def test_the_published_schemas_take_every_part(example):
    validator = pytest.importorskip("kubernetes_validate", reason="schemas of Kubernetes: pip install 'trtdet[dev]'")
    _, parts = example
    assert set(parts) >= {"Deployment", "Service", "HorizontalPodAutoscaler", "PersistentVolumeClaim"}
    for part in parts.values():
        validator.validate(part, validator.latest_version(), strict=True)
    broken = {**parts["Deployment"], "spec": {**parts["Deployment"]["spec"], "replica": 3}}
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, validator.latest_version(), strict=True)


def test_the_parts_belong_together(example):
    name, parts = example
    deployment, service, scaler = (parts[kind] for kind in ("Deployment", "Service", "HorizontalPodAutoscaler"))
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert parts["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == PORTS[name]
    # The kubelet's own port is nobody else's.
    public = {port: number for port, number in ports.items() if port != "admin"}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == public
    for probe, path in HEALTH[name].items():
        assert container[probe]["httpGet"] == {"path": path, "port": "admin" if "admin" in ports else "http"}
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    assert [metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]] == [QUEUE[name]]
    # Two owners of the number of replicas would undo each other.
    assert "replicas" not in deployment["spec"]
    scraped = template["metadata"]["annotations"]
    assert int(scraped["prometheus.io/port"]) in ports.values()


def test_pods_keep_to_the_restricted_standard(example):
    """Pod Security Standards, "restricted": https://kubernetes.io/docs/concepts/security/pod-security-standards/."""
    _, parts = example
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    assert all(len(volume.keys() & allowed) == 1 for volume in pod["volumes"])
    # Nothing in the pod asks the cluster for anything.
    assert pod["automountServiceAccountToken"] is False


def test_the_network_policy_lets_in_what_the_service_is_for(example):
    name, parts = example
    policy = parts["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == parts["Service"]["spec"]["selector"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["egress"] == []
    assert all(rule["from"] for rule in policy["ingress"])
    clients, metrics = ({port["port"] for port in rule["ports"]} for rule in policy["ingress"])
    assert clients | metrics == set(PORTS[name])
    scraped = parts["Deployment"]["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"]
    assert {PORTS[name][port] for port in metrics} == {int(scraped)}


def test_models_are_read_from_a_claimed_volume(example):
    _, parts = example
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    (claimed,) = [volume for volume in volumes.values() if "persistentVolumeClaim" in volume]
    assert claimed["persistentVolumeClaim"]["claimName"] == parts["PersistentVolumeClaim"]["metadata"]["name"]
    (place,) = [path for path, mount in mounts.items() if mount["name"] == claimed["name"]]
    assert mounts[place]["readOnly"] is True
    assert any(
        str(argument).partition("=")[2].startswith(place) or argument.startswith(place)
        for argument in container["args"]
    )


def test_a_pod_that_goes_finishes_first(example):
    _, parts = example
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    allowed = [re.fullmatch(r"--exit-timeout-secs=(\d+)", str(argument)) for argument in container["args"]]
    exits = max((int(match[1]) for match in allowed if match), default=0)
    assert pod["terminationGracePeriodSeconds"] > pause + exits
    assert parts["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_no_registry_is_named(path):
    images = re.findall(r"image: *(\S+)", path.read_text())
    assert images
    assert all(re.fullmatch(r"\$\{[A-Z_]+\}", image) for image in images)
