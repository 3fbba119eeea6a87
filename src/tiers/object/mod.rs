//! The object tier: segments of many partitions in a store that speaks S3.

#[cfg(feature = "object")]
pub mod client;
mod config;
pub mod location;

pub use self::config::{Credentials, ObjectConfig, Secret, UploadCheck};
