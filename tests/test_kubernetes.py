"""What is in deploy/kubernetes fits together, and the server: flags, ports, probes, metrics, the time it takes to stop.

`.ci/run` checks its fields against Kubernetes's own schemas. Those of the inference gateway are custom resources, of
which no package has the schemas: what we use of them is stated here.
"""

import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from quire import __version__
from quire.cli import build_parser
from quire.server.config import ServerConfig
from quire.server.http.guard import PUBLIC
from quire.server.http.routes import Api
from quire.server.keys import Keys
from quire.server.observe import metrics

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy/kubernetes"
DOCUMENTS = [
    document for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text()) if document
]
SOURCE = Path(metrics.__file__).read_text()


def the(kind: str) -> dict[str, Any]:
    (found,) = [document for document in DOCUMENTS if document["kind"] == kind]
    return found


POD = the("Deployment")["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
LABELS = POD["metadata"]["labels"]


def test_the_command_is_one_that_quire_takes_and_has_no_key_in_it():
    parsed = build_parser().parse_args(["serve", *CONTAINER["args"]])
    assert parsed.host == "0.0.0.0"
    assert (
        parsed.port
        == CONTAINER["ports"][0]["containerPort"]
        == int(POD["metadata"]["annotations"]["prometheus.io/port"])
    )
    assert (parsed.api_key, parsed.admin_key) == ([], [])
    mounts = {mount["mountPath"]: mount for mount in CONTAINER["volumeMounts"]}
    for file in (parsed.api_key_file, parsed.admin_key_file):
        assert mounts[str(file.parent)]["readOnly"]
    assert parsed.admin_port not in [port["containerPort"] for port in CONTAINER["ports"]]
    assert CONTAINER["image"].endswith(f":{__version__}")


def test_the_memory_limit_is_stated_once():
    """The server reads it from its control group; a flag that repeats it would go stale when the limit is changed."""
    parsed = build_parser().parse_args(["serve", *CONTAINER["args"]])
    assert CONTAINER["resources"]["limits"]["memory"]
    assert (parsed.memory_budget, parsed.num_pages, parsed.num_host_pages) == (None, None, None)


def test_it_has_time_to_drain():
    """Kubernetes counts preStop and what follows SIGTERM together; connections are given ten seconds more."""
    parsed = build_parser().parse_args(["serve", *CONTAINER["args"]])
    grace, pause = POD["spec"]["terminationGracePeriodSeconds"], CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert grace >= pause + parsed.drain_timeout_s + 10
    readiness = CONTAINER["readinessProbe"]
    assert pause >= readiness["periodSeconds"] * readiness["failureThreshold"]


def test_probes_ask_what_needs_no_key():
    guard = Api(cast(Any, None), ServerConfig(), cast(Any, None)).app(Keys([]))
    paths = {route.path for route in guard._app.routes}
    probes = {name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/health"}
    assert set(probes.values()) <= paths & PUBLIC


def test_it_runs_as_nobody_and_writes_nowhere_but_to_its_cache():
    pod, container = POD["spec"]["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"]
    assert pod["runAsUser"] == int(re.findall(r"^USER (\d+)", (ROOT / "deploy/Containerfile").read_text(), re.M)[-1])
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not POD["spec"]["automountServiceAccountToken"]
    assert container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    writable = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"] if not mount.get("readOnly")}
    assert set(writable) == {"/var/cache/quire", "/tmp"}
    assert all("sizeLimit" in volumes[name]["emptyDir"] for name in writable.values())
    assert {"cpu", "memory"} <= CONTAINER["resources"]["requests"].keys()
    requests, limits = (CONTAINER["resources"][kind] for kind in ("requests", "limits"))
    assert all(limits[name] == requests[name] for name in ("cpu", "memory"))  # threads and pages follow the limits


@pytest.mark.parametrize("metric", the("HorizontalPodAutoscaler")["spec"]["metrics"])
def test_it_scales_by_gauges_that_there_are(metric):
    assert f'_gauge("{metric["pods"]["metric"]["name"]}"' in SOURCE


def test_everything_means_the_same_pods():
    for kind in ("Deployment", "PodDisruptionBudget", "InferencePool"):
        assert the(kind)["spec"]["selector"] == {"matchLabels": LABELS}, kind
    assert the("Service")["spec"]["selector"] == LABELS
    assert the("Service")["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]
    target, name = the("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"], the("Deployment")["metadata"]["name"]
    assert (target["kind"], target["name"]) == ("Deployment", name)
    assert the("HorizontalPodAutoscaler")["spec"]["minReplicas"] == the("Deployment")["spec"]["replicas"]


def test_the_kustomization_has_what_every_cluster_can_take():
    listed = set(the("Kustomization")["resources"])
    assert listed == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "inference-gateway.yaml"}


def test_the_inference_gateways_resources_are_of_their_schemas():
    """Of gateway-api-inference-extension 1.6, llm-d-router and the Gateway API."""
    pool, objective, route = the("InferencePool"), the("InferenceObjective"), the("HTTPRoute")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"].keys() <= {"appProtocol", "endpointPickerRef", "selector", "targetPorts"}
    assert pool["spec"]["targetPorts"] == [{"number": CONTAINER["ports"][0]["containerPort"]}]
    picker = pool["spec"]["endpointPickerRef"]
    assert picker.keys() <= {"failureMode", "group", "kind", "name", "port"}
    assert picker["failureMode"] in ("FailOpen", "FailClose")
    assert 1 <= picker["port"]["number"] <= 65_535
    reference = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool["metadata"]["name"]}
    assert objective["apiVersion"] == "llm-d.ai/v1alpha2"
    assert objective["spec"] == {"priority": -10, "poolRef": reference}
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"].keys() <= {"parentRefs", "hostnames", "rules"}
    (rule,) = route["spec"]["rules"]
    assert rule.keys() <= {"name", "matches", "filters", "backendRefs", "timeouts"}
    assert rule["backendRefs"] == [reference]
    assert rule["timeouts"]["request"] == f"{ServerConfig().request_timeout_s}s"
    text = (FOLDER / "inference-gateway.yaml").read_text()
    named = re.findall(r"vllm:(\w+)", text)
    assert set(named) <= set(metrics.VLLM_NAMES.values())
    assert named
