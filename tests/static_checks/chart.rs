//! The Helm chart: helm and Kubernetes' schemas accept it, and its defaults render the plain
//! manifests.

use std::collections::BTreeMap;
use std::process::{Command, Output};

use uniffle_testkit::tools::available;

use super::packaging::{MANIFESTS, SERVICES, accepts, configured, deploy};

const CHART: &str = include_str!("../../deploy/helm/uniffle-worker/Chart.yaml");
const MONITOR: &str = include_str!("../../deploy/kubernetes/monitoring/podmonitor.yaml");
/// Options that, with the defaults, reach every branch of the templates but refusals and another
/// release name.
const EVERY_OPTION: &[&str] = &[
    "--set=embeddedCoordinator.enabled=true,replicas=5,maxReplicas=6,memoryGiB=3,podMonitor.enabled=true",
    "--set=storageClassName=fast,priorityClassName=high,image.repository=registry:5000/worker,image.tag=x",
    "--set=podAnnotations.a=b,nodeSelector.disk=nvme,imagePullSecrets[0].name=s,podMonitor.labels.release=p",
    "--set=tolerations[0].key=k,tolerations[0].operator=Exists",
    "--set=config.top=tags = [\"ssd\"],config.memoryStore=huge_pages = \"on\"",
    "--set=config.localfileStore=sync = \"group\",config.admin=bind_address = \"127.0.0.1\"",
    "--set=config.tables=[fairness]\ndefault_weight = 2",
];

fn helm(command: &[&str], options: &[&str]) -> Output {
    let chart = deploy("helm/uniffle-worker");
    Command::new("helm").args(command).arg(chart).args(options).output().unwrap()
}

/// Returns the objects of the chart, or `None` without helm.
fn rendered(options: &[&str]) -> Option<String> {
    if !available("the chart", &["helm"]) {
        return None;
    }
    let output = helm(&["template", "uniffle-worker", "--namespace=shuffle"], options);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Returns the objects of a file by kind and name, without comments and blank lines.
fn objects(text: &str) -> BTreeMap<(String, String), String> {
    let is_content = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with('#');
    let documents =
        text.split("---\n").map(|document| document.lines().filter(is_content).collect::<Vec<_>>());
    documents
        .filter(|lines| !lines.is_empty())
        .map(|lines| {
            let value = |key| lines.iter().find_map(|line| line.strip_prefix(key)).unwrap().to_owned();
            ((value("kind: "), value("  name: ")), lines.join("\n") + "\n")
        })
        .collect()
}

#[test]
fn helm_and_kubernetes_accept_the_chart() {
    let dir = tempfile::tempdir().unwrap();
    for options in [&[], EVERY_OPTION] {
        let Some(text) = rendered(options) else { return };
        let linted = helm(&["lint", "--strict"], options);
        assert!(linted.status.success(), "{}", String::from_utf8_lossy(&linted.stdout));
        // Kubernetes has no schema of a PodMonitor.
        let known = objects(&text).into_iter().filter(|((kind, _), _)| kind != "PodMonitor");
        let file = dir.path().join("rendered.yaml");
        std::fs::write(&file, known.map(|(_, object)| format!("---\n{object}")).collect::<String>()).unwrap();
        accepts("kubernetes-validate", &["--strict", file.to_str().unwrap()]);
    }
}

#[test]
fn chart_defaults_render_the_manifests() {
    let Some(text) = rendered(&["--set=podMonitor.enabled=true"]) else { return };
    let monitored = objects(&text);
    let mut chart = objects(&rendered(&[]).unwrap());
    chart.extend(monitored.into_iter().filter(|((kind, _), _)| kind == "PodMonitor"));
    let manifests = objects(&[MANIFESTS, SERVICES, MONITOR].join("\n---\n"));
    assert_eq!(chart.keys().collect::<Vec<_>>(), manifests.keys().collect::<Vec<_>>());
    // Labels of Helm, and a default of Kubernetes.
    let of_helm =
        ["app.kubernetes.io/instance:", "app.kubernetes.io/version:", "helm.sh/", "imagePullPolicy:"];
    let is_common = |line: &&str| {
        !line.contains("managed-by:") && !of_helm.iter().any(|it| line.trim_start().starts_with(it))
    };
    for (name, object) in &chart {
        let common: String = object.lines().filter(is_common).map(|line| format!("{line}\n")).collect();
        assert_eq!(common, manifests[name], "{name:?}");
    }
}

#[test]
fn chart_values_reach_the_configuration() {
    let Some(text) = rendered(EVERY_OPTION) else { return };
    let config = configured(&text, "config.toml: |\n");
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    assert!(config.is_embedded());
    let names: Vec<String> = config.heartbeat.coordinators.iter().map(ToString::to_string).collect();
    let expected = (0..3).map(|n| format!("uniffle-worker-{n}.uniffle-worker:{}", config.worker.grpc_port));
    assert_eq!(names, expected.collect::<Vec<_>>());
    assert_eq!(config.memory.capacity_bytes, 3 << 30);
    // The volume holds the memory file.
    let size = |key: &str| text.split_once(key).unwrap().1.lines().next().unwrap().to_owned();
    let volume: u64 = size("sizeLimit: ").strip_suffix("Mi").unwrap().parse().unwrap();
    assert!(volume << 20 >= (3 << 30) / 100 * 102 + (4 << 20));
    for needed in ["registry:5000/worker:x", "storageClassName: fast", "disk: nvme", "release: p"] {
        assert!(text.contains(needed), "{needed}");
    }
    assert!(!text.contains("prometheus.io/scrape"));
}

#[test]
fn chart_limits_memory_to_the_bound_of_the_process() {
    for gib in [1u64, 3, 12, 16, 17, 36, 37, 64, 512] {
        let Some(text) = rendered(&[&format!("--set=memoryGiB={gib}")]) else { return };
        for key in ["            requests:\n", "            limits:\n"] {
            let memory = text.split_once(key).unwrap().1.split_once("memory: ").unwrap().1;
            let limit: u64 = memory.split_once("Gi\n").unwrap().0.parse().unwrap();
            let bound = (gib << 30) / 20 * 21 + (200 << 20);
            assert!(
                limit << 30 >= bound && (limit - 1) << 30 < bound,
                "{gib} GiB have a limit of {limit} GiB"
            );
        }
    }
}

#[test]
fn chart_refuses_wrong_values() {
    if !available("the chart", &["helm"]) {
        return;
    }
    for (value, reason) in [
        ("replicas=13", "maxReplicas"),
        ("memory=1", "memory"),
        ("coordinators=null", "coordinators"),
        ("coordinators[0]=host", "coordinators"),
    ] {
        let output = helm(&["template", "uniffle-worker"], &["--set", value]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(reason), "{value}: {stderr}");
    }
}

/// Also checks the default values against their schema, and both files with yamllint. Needs no
/// helm.
#[test]
fn chart_has_the_workers_version() {
    let version = env!("CARGO_PKG_VERSION");
    assert!(CHART.contains(&format!("\nversion: {version}\nappVersion: {version}\n")), "{CHART}");
    let (schema, values) = ("helm/uniffle-worker/values.schema.json", "helm/uniffle-worker/values.yaml");
    accepts("check-jsonschema", &["--schemafile", &deploy(schema), &deploy(values)]);
    let rules = "{extends: default, rules: {line-length: {max: 160}, document-start: disable}}";
    accepts("yamllint", &["-d", rules, &deploy(values), &deploy("helm/uniffle-worker/Chart.yaml")]);
}
