//! The list of all metrics of a worker, source of `docs/metrics.md`.

use prometheus::{IntGaugeVec, Registry};

use crate::build::Build;
use crate::flush::metrics::FlushMetrics;
use crate::listeners::http::admin::AdminMetrics;
use crate::listeners::http::{HttpMetrics, push};
use crate::listeners::{grpc, tcp};
use crate::metrics::{self, Description};
use crate::remote::hdfs;
use crate::runtime::RuntimeMetrics;
use crate::service::metrics::ServiceMetrics;
#[cfg(feature = "object")]
use crate::store::offload;
use crate::store::{disk, object};
use crate::telemetry::TelemetryMetrics;
use uniffle_base::allocator::AllocatorMetrics;

use crate::server::settings::reload::ReloadMetrics;
use crate::server::upgrade::UpgradeMetrics;

metrics::table! {
    struct BuildMetrics {
        info: IntGaugeVec["version", "commit"] =
            "uniffle_worker_build_info", "Always 1; the labels name the running program";
    }
}

/// Exports which program runs.
pub(super) fn register_build(build: Build, registry: &Registry) -> prometheus::Result<()> {
    BuildMetrics::new(registry)?.info.with_label_values(&[build.version, build.commit]).set(1);
    Ok(())
}

/// Returns the metric descriptions of all modules. A `{…}` in a name is a part known only at run
/// time.
pub fn metric_descriptions() -> Vec<Description> {
    [
        ServiceMetrics::described(),
        crate::memory::metric_descriptions(),
        FlushMetrics::described(),
        disk::metrics::Metrics::described(),
        hdfs::Metrics::described(),
        object::metrics::Metrics::described(),
        #[cfg(feature = "object")]
        object::client::Metrics::described(),
        #[cfg(feature = "object")]
        offload::Metrics::described(),
        grpc::metrics::GrpcMetrics::described(),
        tcp::metrics::TcpMetrics::described(),
        HttpMetrics::described(),
        push::PushMetrics::described(),
        AdminMetrics::described(),
        uniffle_coordinator::metric_descriptions(),
        ReloadMetrics::described(),
        UpgradeMetrics::described(),
        BuildMetrics::described(),
        RuntimeMetrics::described(),
        AllocatorMetrics::described(),
        TelemetryMetrics::described(),
    ]
    .concat()
}
