//! From the configuration's sections to each module's own settings: one function per part.

use std::sync::Arc;
use std::time::Duration;

use crate::app::AppConfig;
use crate::config::Config;
use crate::coordinator::embedded::{EmbeddedConfig, RemoteStorage};
use crate::coordinator::heartbeat::HeartbeatConfig;
use crate::flush::FlushConfig;
use crate::flush::policy::Limits;
use crate::grpc::GrpcConfig;
use crate::http::HttpConfig;
use crate::io::Disk;
use crate::io::blocking::BlockingDisk;
use crate::memory::MemoryConfig;
use crate::store::LocalConfig;
