//! The object tier: segments of many partitions in a store that speaks S3.

mod config;
pub mod location;

pub use self::config::{Credentials, ObjectConfig, Secret, UploadCheck};
