//! Hadoop settings: the worker's own from `HADOOP_CONF_DIR`, and the relevant ones of a client.
//!
//! A client may send its whole configuration. Only settings with a relevant prefix are kept, and
//! their total size is limited. Settings that are applied later replace earlier ones.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::Context as _;

use crate::schema::files;

/// Setting of the authentication: `simple` or `kerberos`.
pub const AUTHENTICATION: &str = "hadoop.security.authentication";

/// Files of a configuration directory. Later files take precedence.
const FILES: [&str; 2] = ["core-site.xml", "hdfs-site.xml"];
/// Prefixes of the settings that are relevant to a client of HDFS.
const RELEVANT: [&str; 5] = ["dfs.", "fs.default", "fs.viewfs.", "hadoop.security.", "hadoop.rpc."];
/// Maximum size of the relevant settings of one client. Those of a large cluster have about 30 KiB.
const RELEVANT_BYTES_MAX: usize = 256 << 10;
/// Maximum size of a configuration file.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Settings by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HadoopConf(BTreeMap<String, String>);

impl HadoopConf {
    /// Reads `core-site.xml` and `hdfs-site.xml` of a directory. One of them may be missing.
    ///
    /// # Errors
    /// Both files are missing, or a file cannot be read or parsed.
    pub fn read(directory: &Path) -> anyhow::Result<Self> {
        let mut conf = Self::default();
        let mut found = false;
        for name in FILES {
            let path = directory.join(name);
            if std::fs::metadata(&path).is_err() {
                continue;
            }
            let text = files::read_text(&path, FILE_BYTES_MAX).with_context(|| path.display().to_string())?;
            conf.overlay(&parse(&text).with_context(|| path.display().to_string())?);
            found = true;
        }
        anyhow::ensure!(found, "{} has neither {} nor {}", directory.display(), FILES[0], FILES[1]);
        Ok(conf)
    }

    /// Adds settings, which replace existing ones.
    pub fn overlay(&mut self, items: &[(String, String)]) {
        self.0.extend(items.iter().cloned());
    }

    /// Sets a setting that has no value yet.
    pub fn set_default(&mut self, key: &str, value: &str) {
        self.0.entry(key.to_owned()).or_insert_with(|| value.to_owned());
    }

    /// Returns whether a login is required.
    pub fn is_secure(&self) -> bool {
        self.0.get(AUTHENTICATION).is_some_and(|value| !value.trim().eq_ignore_ascii_case("simple"))
    }

    /// Returns whether `host` is a nameservice with NameNodes of its own.
    pub fn is_nameservice(&self, host: &str) -> bool {
        self.0.contains_key(&format!("dfs.ha.namenodes.{host}"))
    }

    /// Returns the settings as a map.
    pub fn into_map(self) -> HashMap<String, String> {
        self.0.into_iter().collect()
    }
}

/// Returns the relevant settings of a client, sorted. It may send its whole configuration.
///
/// # Errors
/// The relevant settings are too large.
pub fn relevant(items: &[(String, String)]) -> Result<Vec<(String, String)>, String> {
    let matters = |key: &str| RELEVANT.iter().any(|start| key.starts_with(start));
    let relevant: BTreeMap<_, _> = items
        .iter()
        .filter(|(key, _)| matters(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    let bytes: usize = relevant.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > RELEVANT_BYTES_MAX {
        return Err(format!(
            "the application's Hadoop settings have {bytes} bytes, the limit is {RELEVANT_BYTES_MAX}"
        ));
    }
    Ok(relevant.into_iter().collect())
}

/// Parses `<configuration><property><name/><value/></property>…`.
fn parse(text: &str) -> anyhow::Result<Vec<(String, String)>> {
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(text, options)?;
    let properties = document.root_element().children().filter(|node| node.has_tag_name("property"));
    let child = |property: &roxmltree::Node<'_, '_>, name: &str| {
        let found = property.children().find(|node| node.has_tag_name(name));
        found.and_then(|node| node.text()).map(|text| text.trim().to_owned())
    };
    Ok(properties.filter_map(|it| Some((child(&it, "name")?, child(&it, "value")?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_settings_override_files_in_order() {
        let directory = tempfile::tempdir().unwrap();
        assert!(HadoopConf::read(directory.path()).unwrap_err().to_string().contains("core-site.xml"));
        let xml = |value: &str| {
            format!(
                "<?xml version=\"1.0\"?><?xml-stylesheet href=\"configuration.xsl\"?><!-- c --><configuration>\
                 <property><name>a</name><value> {value} </value><final>true</final></property>\
                 <property><name>empty</name></property></configuration>"
            )
        };
        std::fs::write(directory.path().join("core-site.xml"), xml("core")).unwrap();
        std::fs::write(directory.path().join("hdfs-site.xml"), xml("hdfs")).unwrap();
        let mut conf = HadoopConf::read(directory.path()).unwrap();
        assert_eq!(conf.0, BTreeMap::from([("a".to_owned(), "hdfs".to_owned())]));
        conf.overlay(&[("a".to_owned(), "client".to_owned())]);
        conf.set_default("a", "default");
        assert_eq!(conf.into_map()["a"], "client");
        std::fs::write(directory.path().join("hdfs-site.xml"), "<configuration><property>").unwrap();
        let error = format!("{:#}", HadoopConf::read(directory.path()).unwrap_err());
        assert!(error.contains("hdfs-site.xml"), "{error}");
    }

    #[test]
    fn security_is_on_when_a_setting_says_so() {
        let conf = |value: &str| {
            let mut conf = HadoopConf::default();
            conf.overlay(&[(AUTHENTICATION.to_owned(), value.to_owned())]);
            conf
        };
        assert!(!HadoopConf::default().is_secure());
        assert!(!conf("simple").is_secure() && conf("kerberos").is_secure());
    }

    #[test]
    fn relevant_settings_are_selected() {
        let item = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let items = [item("dfs.b", "1"), item("yarn.x", "2"), item("dfs.a", "3"), item("dfs.b", "4")];
        assert_eq!(relevant(&items).unwrap(), [item("dfs.a", "3"), item("dfs.b", "4")]);
        assert!(relevant(&[item("dfs.a", &"x".repeat(300_000))]).is_err());
    }
}
