//! Checks a configuration against the limits that the system sets for the process.
//!
//! One estimate per resource: memory, addresses, threads, descriptors and file size. A limit with
//! which the worker cannot run is an error, at the start and in `--check`; one that may be reached
//! later is a warning. Each text names the key, the need and the limit. Connection limits are
//! lowered to the available descriptors, so that data connections leave some for health and
//! administration.

use std::fmt;
use std::io;

use bytesize::ByteSize;

use super::sections::Config;
use crate::listeners::http::admin;
use crate::schema::kind::MIB;
use crate::schema::limits::{AddressLimit, SystemLimit, SystemLimits};
use crate::store::READ_CALLS;

/// Descriptors independent of clients: listeners, logs, the metadata log, coordinators, and the
/// trial start of a successor.
const DESCRIPTORS_BASE: u64 = 96;
/// Descriptors per runtime for its poller.
const DESCRIPTORS_PER_RUNTIME: u64 = 8;
/// Descriptors per disk besides cached log files: its lock, its metadata, calls in progress.
const DESCRIPTORS_PER_DISK: u64 = 32;
/// Descriptors for connections to name nodes and data nodes.
const DESCRIPTORS_HDFS: u64 = 128;
/// gRPC connections that are being closed, in addition to the counted ones.
const CONNECTIONS_LEAVING: u64 = 16;
/// Minimum number of descriptors for clients and files; with fewer the worker does not start.
const DESCRIPTORS_MIN: u64 = 128;

/// Threads of every worker: the main thread, logs, signals, profiles.
const THREADS_BASE: usize = 8;
/// Minimum number of threads for disk calls; with fewer the worker makes no progress.
const BLOCKING_MIN: usize = 8;
/// Maximum number of threads for work that is too long for the runtime.
const BLOCKING_WORK: u64 = 64;
/// Maximum number of threads per disk besides reads and writes of shuffle data: for directory
/// operations, deletions and metadata.
const BLOCKING_PER_DISK: u64 = 10;

/// Addresses that a thread reserves for its stack, the default of Rust.
const STACK_BYTES: u64 = 2 * MIB;
/// Minimum size of a file. With less, the metadata log cannot be written, and nothing is
/// acknowledged.
const FILE_BYTES_MIN: u64 = MIB;

/// A system limit that is too low for the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    key: &'static str,
    need: String,
    limit: String,
    remedy: String,
    is_fatal: bool,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, need, limit, remedy, is_fatal: _ } = self;
        write!(f, "{key}: {need}, {limit}; {remedy}")
    }
}

/// System limits with which the worker cannot run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitsTooLow(Vec<Finding>);

impl fmt::Display for LimitsTooLow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("limits of this system are too low for the configuration:")?;
        self.0.iter().try_for_each(|finding| write!(f, "\n  {finding}"))
    }
}

impl std::error::Error for LimitsTooLow {}

impl LimitsTooLow {
    /// Returns whether too few threads are among the limits.
    #[must_use]
    pub fn has_threads(&self) -> bool {
        self.0.iter().any(|finding| finding.key == THREADS_KEY)
    }

    /// Adds the limits of `other`.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Creates the error for a start at which only `started` threads could be created.
    #[must_use]
    pub fn threads(config: &Config, system: &SystemLimits, started: usize, error: &io::Error) -> Self {
        let needed = config.threads_min();
        let known = system.threads.as_ref().map(|limit| format!(" ({} is {})", limit.name, limit.value));
        Self(vec![Finding {
            key: THREADS_KEY,
            need: format!("{needed} threads are needed"),
            limit: format!("the system started only {started}: {error}{}", known.unwrap_or_default()),
            remedy: THREADS_REMEDY.to_owned(),
            is_fatal: true,
        }])
    }
}

const THREADS_KEY: &str = "runtime_config.worker_threads";
const THREADS_REMEDY: &str =
    "raise the limit (ulimit -u, TasksMax=, the pids limit of the container) or lower the key";

impl Config {
    /// Compares the needs of the configuration with `system`.
    ///
    /// Adds warnings for limits that may be reached later. Lowers the numbers of connections and
    /// cached files to the available descriptors.
    ///
    /// # Errors
    /// All limits with which the worker cannot run.
    pub fn fit(&mut self, system: &SystemLimits) -> Result<(), LimitsTooLow> {
        let addresses: Vec<_> = system.addresses.iter().map(|limit| self.address_finding(limit)).collect();
        let findings = [
            system.memory.as_ref().and_then(|limit| self.memory_finding(limit, system.swap_bytes)),
            system.threads.as_ref().and_then(|limit| self.threads_finding(limit)),
            system.descriptors.as_ref().and_then(|limit| self.fit_descriptors(limit)),
            system.file_bytes.as_ref().and_then(|limit| self.file_finding(limit)),
        ];
        let findings = findings.into_iter().chain(addresses);
        let (fatal, others): (Vec<_>, Vec<_>) = findings.flatten().partition(|finding| finding.is_fatal);
        self.warnings.extend(others.iter().map(ToString::to_string));
        if fatal.is_empty() { Ok(()) } else { Err(LimitsTooLow(fatal)) }
    }

    fn memory_finding(&self, limit: &SystemLimit, swap_bytes: u64) -> Option<Finding> {
        let (capacity, bound) = (self.memory.capacity_bytes, self.resident_bytes_max());
        if bound <= limit.value {
            return None;
        }
        let beside = bound - capacity;
        let fits = limit.value.saturating_sub(beside.min(200 * MIB)) / 21 * 20 / MIB * MIB;
        let is_fatal = capacity > limit.value.saturating_add(swap_bytes);
        let need = match is_fatal {
            true => format!("blocks may use {}", ByteSize(capacity)),
            false => {
                format!("the process may use {} with a capacity of {}", ByteSize(bound), ByteSize(capacity))
            }
        };
        let danger = if is_fatal { "" } else { "the kernel may kill the process; " };
        let remedy = match fits {
            0 => "raise the limit".to_owned(),
            _ => format!("must be at most {}", ByteSize(fits)),
        };
        Some(Finding {
            key: "memory_store.capacity",
            need,
            limit: format!("{} is {}", limit.name, ByteSize(limit.value)),
            remedy: format!("{danger}{remedy}"),
            is_fatal,
        })
    }

    fn address_finding(
        &self,
        AddressLimit { limit, used_bytes, has_files }: &AddressLimit,
    ) -> Option<Finding> {
        let capacity = self.memory.capacity_bytes;
        let is_counted = *has_files || self.memory.backing.is_private();
        let region = if is_counted { capacity } else { 0 };
        let beside = self.resident_bytes_max() - capacity;
        let stacks = |threads: u64| threads.saturating_mul(STACK_BYTES);
        let least = used_bytes + region + stacks(self.threads_min() as u64);
        let most = used_bytes + region + beside + stacks(self.threads_max());
        if most <= limit.value {
            return None;
        }
        let is_fatal = least > limit.value;
        let capacity = ByteSize(capacity);
        let need = match is_fatal {
            true => {
                let least = ByteSize(least);
                format!("the process reserves at least {least} with a capacity of {capacity}")
            }
            false => {
                let most = ByteSize(most);
                format!("the process may reserve {most} with a capacity of {capacity}")
            }
        };
        let danger = if is_fatal { "" } else { "a failed allocation ends the process; " };
        Some(Finding {
            key: "memory_store.capacity",
            need,
            limit: format!("{} is {}", limit.name, ByteSize(limit.value)),
            remedy: format!("{danger}raise the limit or lower the key"),
            is_fatal,
        })
    }

    /// Returns the number of threads that the worker needs to start.
    #[must_use]
    pub fn threads_min(&self) -> usize {
        let blocking = self.worker.blocking_threads.min(BLOCKING_MIN);
        self.worker.threads + self.tcp_threads() + blocking + THREADS_BASE
    }

    fn tcp_threads(&self) -> usize {
        if self.worker.urpc_port.is_some() { self.tcp.own_threads } else { 0 }
    }

    /// Returns the number of threads that are useful.
    fn threads_max(&self) -> u64 {
        let disks = if self.worker.store_type.has_local() { self.local.paths.len() as u64 } else { 0 };
        let calls = READ_CALLS + 2 * self.local.write_concurrency_per_disk;
        let pools = (self.worker.blocking_threads as u64).saturating_mul(1 + self.tcp_threads() as u64);
        let work = disks.saturating_mul(calls as u64 + BLOCKING_PER_DISK).saturating_add(BLOCKING_WORK);
        (self.threads_min() as u64).saturating_add(pools.min(work))
    }

    fn threads_finding(&self, limit: &SystemLimit) -> Option<Finding> {
        let (least, most) = (self.threads_min() as u64, self.threads_max());
        if most <= limit.value {
            return None;
        }
        let is_fatal = least > limit.value;
        let (key, need, remedy) = match is_fatal {
            true => (THREADS_KEY, format!("{least} threads are needed"), THREADS_REMEDY.to_owned()),
            false => (
                "runtime_config.blocking_threads",
                format!("up to {most} threads are useful, {least} are needed"),
                format!("disk calls may wait for threads; {THREADS_REMEDY}"),
            ),
        };
        Some(Finding { key, need, limit: format!("{} is {}", limit.name, limit.value), remedy, is_fatal })
    }

    fn fit_descriptors(&mut self, limit: &SystemLimit) -> Option<Finding> {
        let wanted = self.descriptors();
        if wanted.sum() <= limit.value {
            return None;
        }
        let allowed = format!("{} is {}", limit.name, limit.value);
        let raise = "raise the hard limit (ulimit -Hn, LimitNOFILE=)";
        if limit.value < wanted.base + DESCRIPTORS_MIN {
            return Some(Finding {
                key: "grpc.max_connections",
                need: format!("at least {} descriptors are needed", wanted.base + DESCRIPTORS_MIN),
                limit: allowed,
                remedy: raise.to_owned(),
                is_fatal: true,
            });
        }
        let fitting = wanted.within(limit.value);
        let need = format!("{} descriptors are needed ({wanted})", wanted.sum());
        self.take(fitting);
        Some(Finding {
            key: "grpc.max_connections and tcp.max_connections",
            need,
            limit: allowed,
            remedy: format!("continuing with {fitting}; {raise} for more"),
            is_fatal: false,
        })
    }

    fn descriptors(&self) -> Descriptors {
        let (store, has_tcp) = (self.worker.store_type, self.worker.urpc_port.is_some());
        let disks = if store.has_local() { self.local.paths.len() as u64 } else { 0 };
        let objects = if store.has_object() { 2 * self.object.max_concurrency as u64 } else { 0 };
        let hdfs = if store.has_hdfs() { DESCRIPTORS_HDFS } else { 0 };
        let admin = if self.admin.port.is_some() { admin::CONNECTIONS_MAX as u64 } else { 0 };
        let runtimes = 1 + self.tcp_threads() as u64;
        let own = [
            DESCRIPTORS_BASE,
            DESCRIPTORS_PER_RUNTIME * runtimes,
            DESCRIPTORS_PER_DISK * disks,
            objects,
            hdfs,
            admin,
            CONNECTIONS_LEAVING,
        ];
        Descriptors {
            base: own.iter().sum(),
            http: self.http.connections_max.unwrap_or(self.http.connections_wanted()) as u64,
            files: if disks > 0 { self.local.descriptors_max as u64 } else { 0 },
            grpc: self.grpc.connections_max as u64,
            tcp: if has_tcp { self.tcp.connections_max as u64 } else { 0 },
        }
    }

    fn take(&mut self, fitting: Descriptors) {
        let count = |count: u64| usize::try_from(count).unwrap_or(usize::MAX).max(1);
        self.http.connections_max = Some(count(fitting.http));
        self.local.descriptors_max = count(fitting.files);
        self.grpc.connections_max = count(fitting.grpc);
        self.tcp.connections_max = count(fitting.tcp);
    }

    fn file_finding(&self, limit: &SystemLimit) -> Option<Finding> {
        let allowed = format!("{} is {}", limit.name, ByteSize(limit.value));
        let raise = "raise the limit (ulimit -Hf, LimitFSIZE=)";
        let (capacity, batch) = (self.memory.capacity_bytes, self.flush.batch_bytes_max);
        if !self.memory.backing.is_private() && capacity > limit.value {
            return Some(Finding {
                key: "memory_store.backing",
                need: format!("the memory file has {}", ByteSize(capacity)),
                limit: allowed,
                remedy: raise.to_owned(),
                is_fatal: true,
            });
        }
        if self.worker.store_type.has_local() && limit.value < FILE_BYTES_MIN {
            return Some(Finding {
                key: "localfile_store.data_paths",
                need: format!("the metadata log needs files of {}", ByteSize(FILE_BYTES_MIN)),
                limit: allowed,
                remedy: raise.to_owned(),
                is_fatal: true,
            });
        }
        self.worker.store_type.has_local().then(|| Finding {
            key: "localfile_store.data_paths",
            need: format!("a batch has up to {}, a shuffle any number of batches", ByteSize(batch)),
            limit: allowed,
            // Not fatal: data that cannot be written stays in memory and readable.
            remedy: format!("larger files fail to be written; {raise}"),
            is_fatal: false,
        })
    }
}

/// Numbers of descriptors by use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Descriptors {
    /// Descriptors that do not depend on clients.
    base: u64,
    http: u64,
    /// Cached log files.
    files: u64,
    grpc: u64,
    tcp: u64,
}

impl Descriptors {
    fn sum(&self) -> u64 {
        let Self { base, http, files, grpc, tcp } = *self;
        [base, http, files, grpc, tcp].into_iter().fold(0, u64::saturating_add)
    }

    /// Lowers connections and files to `limit`, which is at least `base + DESCRIPTORS_MIN`.
    fn within(self, limit: u64) -> Self {
        let available = limit.saturating_sub(self.base);
        let http = self.http.min((available / 8).max(32));
        let files = self.files.min(available / 4);
        let rest = available.saturating_sub(http + files);
        let (grpc, both) = (self.grpc, self.grpc.saturating_add(self.tcp));
        if both <= rest {
            return Self { http, files, ..self };
        }
        let part = u128::from(rest) * u128::from(grpc) / u128::from(both.max(1));
        let grpc = u64::try_from(part).unwrap_or(rest);
        Self { http, files, grpc, tcp: rest - grpc, ..self }
    }
}

impl fmt::Display for Descriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { base: _, http, files, grpc, tcp } = self;
        write!(f, "connections: {grpc} gRPC, {tcp} TCP, {http} HTTP; cached files: {files}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schema::Machine;
    use crate::schema::kind::GIB;

    fn config(text: &str) -> Config {
        Config::parse(text, &Default::default(), &Machine::default()).unwrap()
    }

    fn limit(name: &str, value: u64) -> Option<SystemLimit> {
        Some(SystemLimit { name: name.to_owned(), value })
    }

    fn refusal(config: &mut Config, system: &SystemLimits) -> String {
        config.fit(system).unwrap_err().to_string()
    }

    #[test]
    fn unlimited_system_has_no_findings() {
        let mut config = config("");
        let before = config.clone();
        assert_eq!(config.fit(&SystemLimits::default()), Ok(()));
        assert_eq!(config.to_toml(), before.to_toml());
        assert_eq!(config.warnings, before.warnings);
    }

    #[test]
    fn capacity_beyond_memory_is_refused_with_both_figures() {
        let mut large = config("[memory_store]\ncapacity = \"512GiB\"");
        let mut system = SystemLimits { memory: limit("memory.max", 23 * GIB), ..SystemLimits::default() };
        let refused = refusal(&mut large, &system);
        for part in
            ["memory_store.capacity: ", "512.0 GiB", "memory.max is 23.0 GiB", "must be at most 21.7 GiB"]
        {
            assert!(refused.contains(part), "{part}: {refused}");
        }
        system.swap_bytes = 1 << 40;
        assert_eq!(large.fit(&system), Ok(()), "swap counts as memory");
        let mut tight = config("[memory_store]\ncapacity = \"22.9GiB\"");
        let before = tight.warnings.len();
        assert_eq!(tight.fit(&system), Ok(()));
        let added = &tight.warnings[before..];
        assert!(added.len() == 1 && added[0].contains("may use 24.2 GiB"), "{added:?}");
        assert_eq!(config("[memory_store]\ncapacity = \"21.7GiB\"").fit(&system), Ok(()));
    }

    #[test]
    fn suggested_capacity_fits() {
        for memory in [GIB, 4 * GIB, 23 * GIB, 512 * GIB] {
            let fits = (memory - 200 * MIB) / 21 * 20 / MIB * MIB;
            let mut fitting = config(&format!("[memory_store]\ncapacity = \"{fits}\""));
            let before = fitting.warnings.len();
            let system = SystemLimits { memory: limit("m", memory), ..SystemLimits::default() };
            assert_eq!((fitting.fit(&system), fitting.warnings.len()), (Ok(()), before), "{memory}");
        }
    }

    #[test]
    fn insufficient_threads_are_refused_and_few_reported() {
        let mut config = config("[runtime_config]\nworker_threads = 4");
        let least = config.threads_min() as u64;
        let with = |threads| SystemLimits { threads: limit("pids.max", threads), ..SystemLimits::default() };
        let refused = refusal(&mut config, &with(least - 1));
        let needed = format!("runtime_config.worker_threads: {least} threads are needed, pids.max is");
        assert!(refused.contains(&needed), "{refused}");
        let before = config.warnings.len();
        assert_eq!(config.fit(&with(least)), Ok(()));
        assert!(config.warnings[before].starts_with("runtime_config.blocking_threads: "));
        assert_eq!(config.fit(&with(10_000)), Ok(()));
        assert_eq!(config.warnings.len(), before + 1);
    }

    #[test]
    fn connections_are_limited_to_the_descriptors() {
        let mut config = config("[memory_store]\ncapacity = \"10GB\"");
        let with = |descriptors| SystemLimits {
            descriptors: limit("RLIMIT_NOFILE", descriptors),
            ..SystemLimits::default()
        };
        let wanted = config.descriptors();
        let before = config.warnings.len();
        assert_eq!((config.fit(&with(wanted.sum())), config.descriptors()), (Ok(()), wanted));
        assert_eq!(config.fit(&with(1024)), Ok(()));
        let added = &config.warnings[before];
        assert!(added.contains("RLIMIT_NOFILE is 1024") && added.contains("tcp.max_connections"), "{added}");
        let fitting = config.descriptors();
        assert!(fitting.sum() <= 1024, "{fitting:?}");
        assert!(fitting.grpc > 100 && fitting.tcp > 100 && fitting.http > 64, "{fitting:?}");
        let refused = refusal(&mut config, &with(200));
        assert!(refused.contains("RLIMIT_NOFILE is 200"), "{refused}");
    }

    #[test]
    fn file_size_limit_is_reported() {
        let with =
            |bytes| SystemLimits { file_bytes: limit("RLIMIT_FSIZE", bytes), ..SystemLimits::default() };
        let mut private = config("");
        let before = private.warnings.len();
        assert_eq!(private.fit(&with(GIB)), Ok(()));
        assert!(private.warnings[before].contains("RLIMIT_FSIZE is 1.0 GiB"), "{:?}", private.warnings);
        assert_eq!(private.fit(&with(MIB)), Ok(()));
        assert!(private.warnings.last().unwrap().starts_with("localfile_store.data_paths: "));
        let mut kept = config("[memory_store]\ncapacity = \"2GiB\"\nbacking = \"memfd\"");
        assert!(refusal(&mut kept, &with(GIB)).contains("memory_store.backing"));
        for bytes in [0, MIB - 1] {
            let refused = refusal(&mut private, &with(bytes));
            for part in
                ["localfile_store.data_paths: the metadata log needs files of 1.0 MiB", "RLIMIT_FSIZE is"]
            {
                assert!(refused.contains(part), "{part}: {refused}");
            }
        }
    }

    #[test]
    fn address_limits_count_the_region_and_stacks() {
        let with = |value, has_files| {
            let limit = limit("RLIMIT_DATA", value).unwrap();
            let addresses = vec![AddressLimit { limit, used_bytes: 10 * MIB, has_files }];
            SystemLimits { addresses, ..SystemLimits::default() }
        };
        let mut private = config("[memory_store]\ncapacity = \"64MiB\"");
        let least = 74 * MIB + 2 * MIB * private.threads_min() as u64;
        let refused = refusal(&mut private, &with(least - 1, false));
        let needed = format!("memory_store.capacity: the process reserves at least {}", ByteSize(least));
        assert!(refused.contains(&needed) && refused.contains("RLIMIT_DATA is"), "{refused}");
        let before = private.warnings.len();
        assert_eq!(private.fit(&with(least, false)), Ok(()));
        assert!(private.warnings[before].contains("the process may reserve"), "{:?}", private.warnings);
        assert_eq!(private.fit(&with(4 * GIB, false)), Ok(()));
        assert_eq!(private.warnings.len(), before + 1);
        let mut shared = config("[memory_store]\ncapacity = \"64MiB\"\nbacking = \"memfd\"");
        assert_eq!(shared.fit(&with(least - 64 * MIB, false)), Ok(()), "a mapped file does not count");
        assert!(refusal(&mut shared, &with(least - 1, true)).contains("reserves at least"));
    }

    proptest! {
        #[test]
        fn descriptors_never_exceed_the_limit(
            base in 0u64..1000, http in 1u64..10_000, files in 0u64..2000, grpc in 1u64..1_000_000,
            tcp in 0u64..1_000_000, beyond in DESCRIPTORS_MIN..100_000,
        ) {
            let wanted = Descriptors { base, http, files, grpc, tcp };
            let fitting = wanted.within(base + beyond);
            prop_assert!(fitting.sum() <= base + beyond, "{:?}", fitting);
            prop_assert!(fitting.http >= wanted.http.min(32));
            prop_assert!(fitting.grpc <= grpc && fitting.tcp <= tcp && fitting.files <= files);
        }
    }
}
