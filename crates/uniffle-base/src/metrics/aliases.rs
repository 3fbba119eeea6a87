//! Exports a metric under further names, for dashboards of other servers.
//!
//! Values are counted once. A further name costs time only when metrics are gathered.

use std::collections::HashMap;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Registry, Result};

/// Exports the values of `metric` also as `name`.
///
/// # Errors
/// If the name is malformed or taken.
pub(super) fn also<M: Collector + Clone + 'static>(
    registry: &Registry,
    metric: &M,
    name: &str,
) -> Result<()> {
    let desc = metric
        .desc()
        .first()
        .map_or((String::new(), Vec::new()), |desc| (desc.help.clone(), desc.variable_labels.clone()));
    let desc = Desc::new(name.to_owned(), desc.0, desc.1, HashMap::new())?;
    registry.register(Box::new(Alias { metric: metric.clone(), desc }))
}

/// A metric exported under another name.
struct Alias<M> {
    metric: M,
    desc: Desc,
}

impl<M: Collector> Collector for Alias<M> {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut families = self.metric.collect();
        for family in &mut families {
            family.set_name(self.desc.fq_name.clone());
        }
        families
    }
}

#[cfg(test)]
mod tests {
    use prometheus::{IntCounterVec, Opts};

    use super::*;

    #[test]
    fn one_metric_may_have_two_names() {
        let registry = Registry::new();
        let metric = IntCounterVec::new(Opts::new("ours", "help"), &["path"]).unwrap();
        registry.register(Box::new(metric.clone())).unwrap();
        also(&registry, &metric, "theirs").unwrap();
        assert!(also(&registry, &metric, "ours").is_err());
        metric.with_label_values(&["/a"]).inc();
        let families = registry.gather();
        let samples: Vec<_> = families
            .iter()
            .map(|family| (family.name(), family.get_metric()[0].get_counter().get_value()))
            .collect();
        assert_eq!(samples, [("ours", 1.0), ("theirs", 1.0)]);
    }
}
