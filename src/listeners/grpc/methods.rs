//! Paths of the methods that are served ahead of tonic's router.

pub(super) const REQUIRE_BUFFER: &str = "/rss.common.ShuffleServer/requireBuffer";
pub(super) const SEND_SHUFFLE_DATA: &str = "/rss.common.ShuffleServer/sendShuffleData";
pub(super) const GET_MEMORY_SHUFFLE_DATA: &str = "/rss.common.ShuffleServer/getMemoryShuffleData";
pub(super) const GET_LOCAL_SHUFFLE_INDEX: &str = "/rss.common.ShuffleServer/getLocalShuffleIndex";
pub(super) const GET_LOCAL_SHUFFLE_DATA: &str = "/rss.common.ShuffleServer/getLocalShuffleData";
pub(super) const REGISTER_SHUFFLE: &str = "/rss.common.ShuffleServer/registerShuffle";
pub(super) const REPORT_SHUFFLE_RESULT: &str = "/rss.common.ShuffleServer/reportShuffleResult";
pub(super) const GET_SHUFFLE_RESULT: &str = "/rss.common.ShuffleServer/getShuffleResult";
pub(super) const GET_SHUFFLE_RESULT_FOR_MULTI_PART: &str =
    "/rss.common.ShuffleServer/getShuffleResultForMultiPart";
