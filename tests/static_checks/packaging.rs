//! Files in `deploy/` and the workflows pass their linters. Files in `deploy/` agree with the
//! worker's configuration.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Command;

use uniffle_testkit::tools::available;
use uniffle_worker::config::{Config, Machine};

const UNIT: &str = include_str!("../../deploy/systemd/uniffle-worker.service");
const TMPFILES: &str = include_str!("../../deploy/systemd/uniffle-worker.tmpfiles.conf");
const DOCKERFILE: &str = include_str!("../../deploy/docker/Dockerfile");
const COMPOSE: &str = include_str!("../../deploy/compose.yaml");
const RULES: &str = include_str!("../../deploy/prometheus/uniffle-worker.rules.yml");
pub(super) const MANIFESTS: &str = include_str!("../../deploy/kubernetes/uniffle-worker.yaml");
pub(super) const SERVICES: &str = include_str!("../../deploy/kubernetes/services.yaml");
const UNDER_OPERATOR: &str = include_str!("../../deploy/kubernetes/operator/uniffle-worker.yaml");

/// Runs `tool` and asserts success. Prints a line if it is missing; in CI that panics.
pub(super) fn accepts(tool: &str, arguments: &[&str]) {
    if !available(&format!("{tool} on deploy/"), &[tool]) {
        return;
    }
    let output = Command::new(tool).args(arguments).output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{tool}: {}", String::from_utf8_lossy(&printed));
}

pub(super) fn deploy(path: &str) -> String {
    format!("{}/deploy/{path}", env!("CARGO_MANIFEST_DIR"))
}

/// The check needs a binary and a user that exist: `/bin/true` replaces the worker, and the user's
/// lines are removed.
#[test]
fn systemd_accepts_the_unit() {
    let dir = tempfile::tempdir().unwrap();
    let unit: String = UNIT
        .lines()
        .filter(|line| !line.starts_with("User=") && !line.starts_with("Group="))
        .map(|line| line.replace("/usr/local/bin/uniffle-worker", "/bin/true") + "\n")
        .collect();
    let path = dir.path().join("uniffle-worker.service");
    std::fs::write(&path, unit).unwrap();
    accepts("systemd-analyze", &["verify", "--man=no", path.to_str().unwrap()]);
}

/// The file for systemd-tmpfiles writes the kernel setting that the worker reads.
#[test]
fn tmpfiles_enable_huge_pages_for_memfds() {
    let lines: Vec<_> = TMPFILES.lines().filter(|line| !line.starts_with('#')).collect();
    let source = include_str!("../../crates/uniffle-memory/src/persistent/huge.rs");
    let setting = source.split('"').find(|it| it.ends_with("shmem_enabled")).unwrap();
    assert_eq!(lines, [format!("w {setting} - - - - advise")]);
}

#[test]
fn yamllint_accepts_the_manifests() {
    let rules = "{extends: default, rules: {line-length: {max: 160}, document-start: disable}}";
    accepts("yamllint", &["-d", rules, &deploy("kubernetes")]);
}

/// Checks against the schemas of Kubernetes, without unknown fields.
#[test]
fn kubernetes_accepts_the_manifests() {
    for file in ["kubernetes/namespace.yaml", "kubernetes/uniffle-worker.yaml", "kubernetes/services.yaml"] {
        accepts("kubernetes-validate", &["--strict", &deploy(file)]);
    }
    let dir = tempfile::tempdir().unwrap();
    let scaler = dir.path().join("scaler.yaml");
    let example = indented(include_str!("../../docs/kubernetes.md"), "as one ratio:\n\n");
    assert!(
        example.contains("kind: HorizontalPodAutoscaler")
            && example.contains("kind: StatefulSet, name: uniffle-worker")
    );
    std::fs::write(&scaler, example).unwrap();
    accepts("kubernetes-validate", &["--strict", scaler.to_str().unwrap()]);
}

/// Checks the file for Uniffle's operator: its resource against a schema derived from the
/// operator's CRD, and embedded pod parts and other documents against the schemas of Kubernetes.
#[test]
fn operator_and_kubernetes_accept_the_resource() {
    let dir = tempfile::tempdir().unwrap();
    let written = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (resources, others): (Vec<&str>, Vec<&str>) = UNDER_OPERATOR
        .split("---\n")
        .skip(1)
        .partition(|document| document.contains("kind: RemoteShuffleService"));
    let schema =
        format!("{}/tests/static_checks/remote_shuffle_service.schema.json", env!("CARGO_MANIFEST_DIR"));
    let resource = written("resource.yaml", resources[0]);
    accepts("check-jsonschema", &["--schemafile", &schema, &resource]);
    accepts("kubernetes-validate", &["--strict", &written("others.yaml", &others.join("---\n"))]);
    accepts("kubernetes-validate", &["--strict", &written("pod.yaml", &pod_of_the_operator(resources[0]))]);
    assert_eq!((resources.len(), others.len()), (1, 2));
}

/// Returns the pod that the operator creates from `shuffleServer`, without its additions
/// (`GenerateSts` in shuffleserver.go).
fn pod_of_the_operator(resource: &str) -> String {
    let server = resource.split_once("\n  shuffleServer:\n").unwrap().1;
    let part = |key: &str, indent: usize| {
        let begin = format!("    {key}:");
        let lines = server.lines().skip_while(|line| !line.starts_with(&begin));
        let inside = lines.enumerate().take_while(|(n, line)| *n == 0 || line.starts_with("     "));
        let lines = inside.map(|(_, line)| format!("{}{}\n", " ".repeat(indent), &line[4..]));
        let text: String = lines.collect();
        assert!(!text.is_empty(), "{key}");
        text
    };
    let container: String =
        ["image", "args", "env", "resources", "volumeMounts"].map(|key| part(key, 6)).concat();
    let pod: String = ["volumes", "affinity", "securityContext"].map(|key| part(key, 2)).concat();
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: x\nspec:\n{pod}  containers:\n    - name: x\n{container}"
    )
}

fn assert_paths_are_on_the_volume(config: &Config) {
    let paths = &config.local.paths;
    assert!(!paths.is_empty() && paths.iter().all(|path| path.starts_with("/data")), "{paths:?}");
}

/// The operator's requirements on a shuffle server agree with the worker's configuration.
#[test]
fn operator_resource_matches_worker_configuration() {
    let config = configured(UNDER_OPERATOR, "config.toml: |\n");
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    let (grpc, http) = (config.worker.grpc_port, config.worker.http_port);
    assert!(UNDER_OPERATOR.contains(&format!("    rpcPort: {grpc}\n    httpPort: {http}\n")));
    // The operator excludes nodes by address and gRPC port. That is the complete id only without
    // the TCP listener.
    assert_eq!(config.worker.urpc_port, None);
    assert!(config.heartbeat.coordinators.iter().all(|it| it.to_string().ends_with(":19997")));
    assert!(UNDER_OPERATOR.contains("    count: 2\n") && config.heartbeat.coordinators.len() == 2);
    for key in ["coordinator.conf", "server.conf", "log4j.properties"] {
        assert!(UNDER_OPERATOR.contains(&format!("\n  {key}: ")), "the operator refuses a map without {key}");
    }
    assert!(
        !UNDER_OPERATOR.contains("\n    hostPathMounts:")
            && UNDER_OPERATOR.contains("kind: PodDisruptionBudget")
    );
    assert_paths_are_on_the_volume(&config);
    assert!(config.worker.flush_timeout.as_secs() < 30);
}

#[test]
fn github_accepts_the_workflows() {
    let files: Vec<_> = std::fs::read_dir(deploy("../.github/workflows")).unwrap().collect();
    assert!(files.len() > 1, "only {} workflows: the search is broken", files.len());
    for file in files {
        let file = file.unwrap().path();
        let schema = ["--builtin-schema", "vendor.github-workflows"];
        accepts("check-jsonschema", &[&schema[..], &[file.to_str().unwrap()]].concat());
    }
}

#[test]
fn hadolint_accepts_the_dockerfile() {
    accepts("hadolint", &[&deploy("docker/Dockerfile")]);
}

/// Properties of the unit that operators rely on.
#[test]
fn unit_reloads_restarts_and_stops() {
    for line in [
        "ExecReload=/bin/kill -HUP $MAINPID",
        "Restart=on-failure",
        "StartLimitIntervalSec=0",
        "FileDescriptorStoreMax=4096",
        "TimeoutStopSec=360",
        "LimitNOFILE=1048576",
        "KillSignal=SIGTERM",
    ] {
        assert!(UNIT.lines().any(|it| it == line), "{line}");
    }
    // Each of these can make the unit fail permanently, which discards its descriptor store.
    for ends in ["StartLimitBurst=", "RestartPreventExitStatus=", "ExecStartPre="] {
        assert!(!UNIT.lines().any(|line| line.starts_with(ends)), "{ends}");
    }
}

/// The image runs as an ordinary user, without a shell between the worker and its signals. The file
/// shows it without a container engine.
#[test]
fn image_runs_as_ordinary_user_without_sources() {
    let instructions: Vec<&str> = DOCKERFILE
        .lines()
        .filter_map(|line| line.split_once(' ').map(|(word, _)| word))
        .filter(|word| word.chars().all(|c| c.is_ascii_uppercase()) && word.len() > 2)
        .collect();
    let stages: Vec<&str> = DOCKERFILE.split("\nFROM ").skip(1).collect();
    assert_eq!(instructions.iter().filter(|word| **word == "FROM").count(), stages.len());
    // The last stage takes one file from the others.
    let last = stages.last().unwrap();
    assert!(
        last.starts_with("debian:") && last.matches("COPY --from=").count() == 1 && !last.contains(" . .")
    );
    // Dependencies have a layer of their own, above the sources.
    let (dependencies, sources) = stages[2].split_once("COPY . .").unwrap();
    assert!(dependencies.contains("cargo build") && sources.contains("touch {} +"));
    assert!(!DOCKERFILE.contains(":latest"));
    assert!(DOCKERFILE.contains("cargo build --release --locked"));
    let user = DOCKERFILE.find("\nUSER 10001").unwrap();
    assert!(
        DOCKERFILE.find("\nENTRYPOINT [").expect("the image needs an entry point in the exec form") > user
    );
    assert!(DOCKERFILE.contains("VOLUME [\"/data\"]") && DOCKERFILE.contains("ENV XDG_STATE_HOME=/data"));
    for port in ["21100", "21200", "19998"] {
        assert!(DOCKERFILE.lines().any(|line| line.starts_with("EXPOSE") && line.contains(port)), "{port}");
    }
}

/// Files that name the image use this version, and the image's build gets the commit.
#[test]
fn image_tags_are_of_this_version() {
    let page = include_str!("../../docs/kubernetes.md");
    for text in [COMPOSE, MANIFESTS, UNDER_OPERATOR, page] {
        let tags = text.split("uniffle-worker:").skip(1).filter_map(|tag| tag.split_whitespace().next());
        // Others are ports.
        let versions: Vec<&str> = tags.filter(|tag| tag.contains('.')).collect();
        assert!(versions.iter().all(|version| *version == env!("CARGO_PKG_VERSION")), "{versions:?}");
        assert!(!versions.is_empty());
    }
    assert!(
        DOCKERFILE.matches("ARG COMMIT\n").count() == 2
            && DOCKERFILE.contains("WORKER_GIT_COMMIT=\"$COMMIT\" cargo")
    );
}

/// Returns the indented text after `mark`.
fn indented(text: &str, mark: &str) -> String {
    let begin = text.find(mark).unwrap() + mark.len();
    let indent = text[begin..].len() - text[begin..].trim_start_matches(' ').len();
    let inside = |line: &&str| line.is_empty() || line.starts_with(&" ".repeat(indent));
    let lines = text[begin..].lines().take_while(inside);
    lines.map(|line| line.get(indent..).unwrap_or("").to_owned() + "\n").collect()
}

/// Parses the configuration after `mark`.
pub(super) fn configured(text: &str, mark: &str) -> Config {
    let text = indented(text, mark);
    let machine = Machine { memory_bytes: 16 << 30, cores: 4, state_dir: PathBuf::from("/nonexistent") };
    Config::parse(&text, &HashMap::new(), &machine).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// docs/kubernetes.md replaces the Java coordinators with these pods.
#[test]
fn coordinator_quorum_names_pods_of_the_manifests() {
    let page = include_str!("../../docs/kubernetes.md");
    let config = configured(page, "## Without Java\n\n");
    assert!(
        config.is_embedded() && config.has_quorum() && config.warnings.is_empty(),
        "{:?}",
        config.warnings
    );
    assert!(
        MANIFESTS.contains("\n  serviceName: uniffle-worker\n") && MANIFESTS.contains("\n  replicas: 3\n")
    );
    let names: Vec<String> = config.heartbeat.coordinators.iter().map(ToString::to_string).collect();
    let expected: Vec<String> =
        (0..3).map(|n| format!("uniffle-worker-{n}.uniffle-worker:{}", config.worker.grpc_port)).collect();
    assert_eq!(names, expected);
}

#[test]
fn yamllint_and_schema_accept_the_compose_file() {
    let rules = "{extends: default, rules: {line-length: {max: 160}, document-start: disable}}";
    accepts("yamllint", &["-d", rules, &deploy("compose.yaml")]);
    accepts("check-jsonschema", &["--builtin-schema", "vendor.compose-spec", &deploy("compose.yaml")]);
}

/// The coordinators, ports, rules and dashboard that the file names exist.
#[test]
fn compose_file_is_consistent() {
    let config = configured(COMPOSE, "  worker:\n    content: |\n");
    assert!(config.is_embedded() && config.warnings.is_empty(), "{:?}", config.warnings);
    assert_eq!(config.heartbeat.coordinators.len(), 2);
    for coordinator in &config.heartbeat.coordinators {
        let (service, port) = (coordinator.host(), config.worker.grpc_port);
        assert_eq!(coordinator.to_string(), format!("{service}:{port}"));
        let target = format!("{service}:{}", config.worker.http_port);
        for needed in [format!("\n  {service}:\n    <<: *worker\n"), target] {
            assert!(COMPOSE.contains(&needed), "{needed}");
        }
    }
    let quorum: Vec<String> = config.heartbeat.coordinators.iter().map(ToString::to_string).collect();
    assert!(COMPOSE.contains(&format!("spark.rss.coordinator.quorum={}\n", quorum.join(","))));
    for file in ["prometheus/uniffle-worker.rules.yml", "grafana/uniffle-worker.json"] {
        assert!(
            COMPOSE.contains(&format!("./{file}:")) && std::path::Path::new(&deploy(file)).is_file(),
            "{file}"
        );
    }
    // The alert rules recognise a worker that was never scraped by its job name.
    assert!(COMPOSE.contains("job_name: uniffle-worker\n") && RULES.contains("job=~\".*uniffle.*\""));
    assert!(COMPOSE.contains("dockerfile: deploy/docker/Dockerfile") && !COMPOSE.contains(":latest"));
}

/// The manifests contain one configuration, whose ports and paths match the rest of the file.
#[test]
fn manifests_match_worker_configuration() {
    let config = configured(MANIFESTS, "config.toml: |\n");
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    for port in [config.worker.grpc_port, config.worker.urpc_port.unwrap(), config.worker.http_port] {
        assert!(MANIFESTS.contains(&format!("containerPort: {port}")), "{port}");
    }
    let admin = config.admin.port.unwrap();
    // The default address of `ctl`.
    assert_eq!((admin, config.worker.http_port), (19_997, 19_998));
    assert!(MANIFESTS.contains(r#"["uniffle-worker", "ctl", "decommission", "--wait", "--within", "600"]"#));
    for needed in [
        "kind: StatefulSet",
        "kind: PodDisruptionBudget",
        "topologySpreadConstraints:",
        "volumeClaimTemplates:",
        "preStop:",
        "readinessProbe:",
        "livenessProbe:",
    ] {
        assert!(MANIFESTS.contains(needed), "{needed}");
    }
    assert_paths_are_on_the_volume(&config);
}

/// A pod is announced as the address of the Service with its name, so it stays the same worker on
/// every node. An autoscaler's maximum is covered.
#[test]
fn each_replica_has_its_own_service() {
    let config = configured(MANIFESTS, "config.toml: |\n");
    let number = |text: &str, key: &str| {
        let rest = text.split_once(key).unwrap().1;
        rest.lines().next().unwrap().parse::<usize>().unwrap()
    };
    let scaled = number(include_str!("../../docs/kubernetes.md"), "maxReplicas: ");
    let services: Vec<&str> = SERVICES.split("---\n").skip(1).collect();
    assert_eq!(services.len(), scaled.max(number(MANIFESTS, "\n  replicas: ")));
    for (replica, service) in services.iter().enumerate() {
        let name = format!("uniffle-worker-{replica}\n");
        assert!(service.contains(&format!("\n  name: {name}")), "{service}");
        assert!(service.contains(&format!("statefulset.kubernetes.io/pod-name: {name}")), "{service}");
        assert!(!service.contains("clusterIP: None"), "a service has no address: {service}");
        for port in [config.worker.grpc_port, config.worker.urpc_port.unwrap(), config.worker.http_port] {
            assert!(service.contains(&format!("port: {port}\n")), "{port}");
        }
    }
    assert!(MANIFESTS.contains("name: WORKER_IP\n              value: $(POD_NAME).$(POD_NAMESPACE).svc\n"));
}
