//! Assignment of partitions to servers: a coordinator's response, checked once and trusted
//! afterwards.
//!
//! Invariant: every partition of the shuffle is in exactly one range. Each range lists its replicas
//! without duplicates, in the coordinator's order.

use uniffle_wire::types::PartitionId;

use crate::error::Error;
use crate::proto::{PartitionRangeAssignment, ShuffleServerId};

/// Address of a shuffle server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ServerAddress {
    /// `ip-grpcPort` or `ip-grpcPort-tcpPort`. Names of remote files begin with it.
    pub id: String,
    /// IP address or host name.
    pub host: String,
    /// gRPC port.
    pub grpc_port: u16,
    /// Port of the raw TCP protocol, if the server has one.
    pub tcp_port: Option<u16>,
    /// Port of metrics and status, if the server reports one.
    pub http_port: Option<u16>,
}

impl ServerAddress {
    pub(crate) fn from_message(server: &ShuffleServerId) -> Result<Self, Error> {
        let port = |port: i32| u16::try_from(port).ok().filter(|port| *port != 0);
        let refuse = |what: &str| Error::Assignment(format!("server {:?} has no {what}", server.id));
        if server.id.is_empty() || server.ip.is_empty() {
            return Err(refuse("id or address"));
        }
        Ok(Self {
            id: server.id.clone(),
            host: server.ip.clone(),
            grpc_port: port(server.port).ok_or_else(|| refuse("port"))?,
            tcp_port: port(server.netty_port),
            http_port: port(server.jetty_port),
        })
    }

    fn to_message(&self) -> ShuffleServerId {
        ShuffleServerId {
            id: self.id.clone(),
            ip: self.host.clone(),
            port: self.grpc_port.into(),
            netty_port: self.tcp_port.map_or(0, i32::from),
            jetty_port: self.http_port.map_or(0, i32::from),
        }
    }

    /// Returns `host:port` of gRPC in the form that a URL requires.
    pub(crate) fn grpc_authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.grpc_port),
            false => format!("{}:{}", self.host, self.grpc_port),
        }
    }
}

/// A range of partitions that share their servers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Range {
    start: i32,
    /// Inclusive.
    end: i32,
    /// Indexes into the list of servers.
    replicas: Vec<usize>,
}

/// Assignment of partitions to servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    partitions: i32,
    ranges: Vec<Range>,
    servers: Vec<ServerAddress>,
}

impl Assignment {
    /// Checks a response for a shuffle of `partitions` partitions with at least `replicas` servers
    /// each.
    ///
    /// # Errors
    /// [`Error::Assignment`].
    pub(crate) fn new(
        partitions: i32,
        replicas: usize,
        answer: &[PartitionRangeAssignment],
    ) -> Result<Self, Error> {
        let mut all = Self { partitions, ranges: Vec::with_capacity(answer.len()), servers: Vec::new() };
        let mut by_start: Vec<_> = answer.iter().collect();
        by_start.sort_by_key(|range| range.start_partition);
        let mut next = 0;
        for range in by_start {
            let (start, end) = (range.start_partition, range.end_partition);
            if start != next || end < start || end == i32::MAX {
                return Err(Error::Assignment(format!("range {start} to {end} where {next} should follow")));
            }
            next = end + 1;
            let mut indexes = Vec::with_capacity(range.server.len());
            for server in &range.server {
                let index = all.index_of(ServerAddress::from_message(server)?);
                if indexes.contains(&index) {
                    return Err(Error::Assignment(format!("server {:?} twice in range {start}", server.id)));
                }
                indexes.push(index);
            }
            if indexes.len() < replicas {
                let found = indexes.len();
                return Err(Error::Assignment(format!("{found} of {replicas} replicas for range {start}")));
            }
            all.ranges.push(Range { start, end, replicas: indexes });
        }
        if partitions < 1 || next < partitions {
            return Err(Error::Assignment(format!("{next} of {partitions} partitions have servers")));
        }
        Ok(all)
    }

    fn index_of(&mut self, server: ServerAddress) -> usize {
        // A shuffle has few servers (`rss.coordinator.shuffle.nodes.max` is 9), so a linear search
        // suffices.
        let found = self.servers.iter().position(|known| *known == server);
        found.unwrap_or_else(|| {
            self.servers.push(server);
            self.servers.len() - 1
        })
    }

    /// Returns the number of partitions of the shuffle.
    #[must_use]
    pub fn partitions(&self) -> i32 {
        self.partitions
    }

    /// Returns all servers.
    #[must_use]
    pub fn servers(&self) -> &[ServerAddress] {
        &self.servers
    }

    /// Returns the replicas of `partition` as indexes into [`Assignment::servers`]. Empty for a
    /// partition that does not exist.
    #[must_use]
    pub fn replicas(&self, partition: PartitionId) -> &[usize] {
        let exists = (0..self.partitions).contains(&partition.0);
        let at = self.ranges.partition_point(|range| range.end < partition.0);
        let range = self.ranges.get(at).filter(|range| exists && range.start <= partition.0);
        range.map_or(&[], |range| &range.replicas)
    }

    /// Returns the inclusive partition ranges of server number `server`, as the coordinator divided
    /// them.
    pub(crate) fn ranges_of(&self, server: usize) -> Vec<(i32, i32)> {
        let own = self.ranges.iter().filter(|range| range.replicas.contains(&server));
        own.map(|range| (range.start, range.end)).collect()
    }

    pub(crate) fn to_message(&self) -> Vec<PartitionRangeAssignment> {
        let server = |&index: &usize| self.servers[index].to_message();
        let range = |range: &Range| PartitionRangeAssignment {
            start_partition: range.start,
            end_partition: range.end,
            server: range.replicas.iter().map(server).collect(),
        };
        self.ranges.iter().map(range).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(port: i32) -> ShuffleServerId {
        ShuffleServerId { id: format!("h-{port}"), ip: "h".to_owned(), port, netty_port: -1, jetty_port: 0 }
    }

    fn range(start_partition: i32, end_partition: i32, ports: &[i32]) -> PartitionRangeAssignment {
        let server = ports.iter().map(|&port| server(port)).collect();
        PartitionRangeAssignment { start_partition, end_partition, server }
    }

    #[test]
    fn assignment_returns_replicas_in_order() {
        let answer = [range(2, 2, &[7, 5]), range(0, 1, &[5, 6]), range(3, 5, &[6, 7])];
        let assignment = Assignment::new(5, 2, &answer).unwrap();
        let ports = |partition: i32| {
            let replicas = assignment.replicas(PartitionId(partition));
            replicas.iter().map(|&at| assignment.servers()[at].grpc_port).collect::<Vec<_>>()
        };
        assert_eq!([ports(0), ports(1), ports(2), ports(4)], [[5, 6], [5, 6], [7, 5], [6, 7]]);
        // The last range may be wider than the shuffle.
        assert!(ports(5).is_empty() && ports(-1).is_empty());
        assert_eq!(assignment.servers().len(), 3);
        assert_eq!(assignment.servers()[0].tcp_port, None);
        let seven = assignment.servers().iter().position(|server| server.grpc_port == 7).unwrap();
        assert_eq!(assignment.ranges_of(seven), [(2, 2), (3, 5)]);
        assert_eq!(Assignment::new(5, 2, &assignment.to_message()).unwrap(), assignment);
    }

    #[test]
    fn unusable_assignments_are_refused() {
        let wrong = [
            vec![],
            vec![range(0, 0, &[5])],
            vec![range(0, 0, &[5]), range(2, 2, &[5])],
            vec![range(0, 1, &[5]), range(1, 2, &[5])],
            vec![range(0, i32::MAX, &[5])],
            vec![range(1, 0, &[5]), range(0, 2, &[5])],
            vec![range(0, 2, &[0])],
            vec![range(0, 2, &[70_000])],
            vec![range(0, 2, &[])],
            vec![range(0, 2, &[5, 5])],
        ];
        for answer in wrong {
            assert!(matches!(Assignment::new(3, 1, &answer), Err(Error::Assignment(_))), "{answer:?}");
        }
        assert!(Assignment::new(3, 2, &[range(0, 2, &[5])]).is_err());
        assert!(Assignment::new(0, 1, &[range(0, 2, &[5])]).is_err());
    }
}
