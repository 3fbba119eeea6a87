package uniffle.driver;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.hadoop.conf.Configuration;
import org.apache.uniffle.client.api.ShuffleReadClient;
import org.apache.uniffle.client.api.ShuffleWriteClient;
import org.apache.uniffle.client.factory.ShuffleClientFactory;
import org.apache.uniffle.client.response.CompressedShuffleBlock;
import org.apache.uniffle.client.response.SendShuffleDataResult;
import org.apache.uniffle.common.ClientType;
import org.apache.uniffle.common.PartitionRange;
import org.apache.uniffle.common.RemoteStorageInfo;
import org.apache.uniffle.common.ShuffleBlockInfo;
import org.apache.uniffle.common.ShuffleDataDistributionType;
import org.apache.uniffle.common.ShuffleServerInfo;
import org.apache.uniffle.common.config.RssClientConf;
import org.apache.uniffle.common.config.RssConf;
import org.apache.uniffle.common.util.BlockIdLayout;
import org.apache.uniffle.common.util.ChecksumUtils;
import org.apache.uniffle.shaded.org.roaringbitmap.longlong.Roaring64NavigableMap;

/**
 * An application that writes one shuffle after another and reads each back. Each thread is a map task, then a reader
 * of partitions. The blocks read are compared with the blocks written, not with the server's reports.
 */
final class Shuffles implements AutoCloseable {
  private final String clientType;
  private final ShuffleServerInfo server;
  private final Shape shape;
  private final Content content;
  private final String app = "driver_" + ProcessHandle.current().pid() + "_" + System.currentTimeMillis();
  private final RssConf conf = new RssConf();
  private final BlockIdLayout layout = BlockIdLayout.DEFAULT;
  private final ShuffleWriteClient client;
  private final ExecutorService threads;
  private final List<Set<Long>> written = new ArrayList<>();
  private int shuffle;

  Shuffles(String clientType, ShuffleServerInfo server, Shape shape, long waitMs) {
    this.clientType = clientType;
    this.server = server;
    this.shape = shape;
    content = new Content(shape.blockBytes);
    conf.set(RssClientConf.RSS_CLIENT_TYPE, ClientType.valueOf(clientType));
    conf.set(RssClientConf.RSS_STORAGE_TYPE, "MEMORY_LOCALFILE");
    // The values that Spark's shuffle manager gives the client unless configured.
    client = ShuffleClientFactory.getInstance().createShuffleWriteClient(
        ShuffleClientFactory.newWriteBuilder()
            .clientType(clientType)
            .retryMax(100)
            .retryIntervalMax(waitMs)
            .heartBeatThreadNum(1)
            .replica(1)
            .replicaWrite(1)
            .replicaRead(1)
            .replicaSkipEnabled(true)
            .dataTransferPoolSize(shape.threads)
            .dataCommitPoolSize(1)
            .unregisterThreadPoolSize(1)
            .unregisterRequestTimeSec(60)
            .rssConf(conf));
    threads = Executors.newFixedThreadPool(shape.threads);
    begin();
  }

  private void begin() {
    written.clear();
    List<PartitionRange> ranges = new ArrayList<>();
    for (int partition = 0; partition < shape.partitions; partition++) {
      written.add(new HashSet<>());
      ranges.add(new PartitionRange(partition, partition));
    }
    client.registerShuffle(
        server, app, shuffle, ranges, new RemoteStorageInfo(""), ShuffleDataDistributionType.NORMAL, -1);
  }

  /** Unregisters the shuffle and begins the next one. */
  void unregister() {
    client.unregisterShuffle(app, shuffle);
    shuffle++;
    begin();
  }

  void write() throws Exception {
    all(this::writeTask);
  }

  private void writeTask(int task) {
    Map<Integer, Set<Long>> blocks = new HashMap<>();
    for (int send = 0; send < shape.sendsPerTask; send++) {
      List<ShuffleBlockInfo> message = message(task, send, blocks);
      SendShuffleDataResult result = client.sendShuffleData(app, message, () -> false);
      if (!result.getFailedBlockIds().isEmpty() || result.getSuccessBlockIds().size() != message.size()) {
        throw new IllegalStateException(result.getFailedBlockIds().size() + " blocks of a send failed");
      }
    }
    client.reportShuffleResult(Map.of(server, blocks), app, shuffle, task, 1);
    synchronized (written) {
      blocks.forEach((partition, ids) -> written.get(partition).addAll(ids));
    }
  }

  private List<ShuffleBlockInfo> message(int task, int send, Map<Integer, Set<Long>> blocks) {
    List<ShuffleBlockInfo> message = new ArrayList<>();
    for (int n = 0; n < shape.spread; n++) {
      int partition = shape.partition(task, send, n);
      Set<Long> ids = blocks.computeIfAbsent(partition, unused -> new HashSet<>());
      for (int block = 0; block < shape.run; block++) {
        long id = layout.getBlockId(ids.size(), partition, task);
        ids.add(id);
        byte[] bytes = content.block(id, shape.blockBytes);
        message.add(new ShuffleBlockInfo(
            shuffle, partition, id, bytes.length, ChecksumUtils.getCrc32(bytes), bytes, List.of(server),
            bytes.length, 0, task));
      }
    }
    return message;
  }

  void read() throws Exception {
    AtomicInteger next = new AtomicInteger();
    all(unused -> {
      for (int partition = next.getAndIncrement(); partition < shape.partitions;
          partition = next.getAndIncrement()) {
        readPartition(partition);
      }
    });
  }

  private void readPartition(int partition) {
    Set<Long> missing = new HashSet<>(written.get(partition));
    Roaring64NavigableMap reported =
        client.getShuffleResult(clientType, Set.of(server), app, shuffle, partition);
    if (reported.getLongCardinality() != missing.size() || !missing.stream().allMatch(reported::contains)) {
      throw new IllegalStateException("partition " + partition + ": the reported ids are not those written");
    }
    Roaring64NavigableMap tasks = new Roaring64NavigableMap();
    for (int task = 0; task < shape.threads; task++) {
      tasks.addLong(task);
    }
    ShuffleReadClient reader = ShuffleClientFactory.getInstance().createShuffleReadClient(
        ShuffleClientFactory.newReadBuilder()
            .appId(app)
            .shuffleId(shuffle)
            .partitionId(partition)
            .partitionNumPerRange(1)
            .partitionNum(shape.partitions)
            .basePath("")
            .blockIdBitmap(reported)
            .taskIdBitmap(tasks)
            .shuffleServerInfoList(List.of(server))
            .hadoopConf(new Configuration())
            .shuffleDataDistributionType(ShuffleDataDistributionType.NORMAL)
            .rssConf(conf));
    try {
      CompressedShuffleBlock block = reader.readShuffleBlockData();
      while (block != null && block.getByteBuffer() != null) {
        long id = content.check(block.getByteBuffer(), shape.blockBytes);
        if (!missing.remove(id)) {
          throw new IllegalStateException("block " + id + " was not written or came twice");
        }
        block = reader.readShuffleBlockData();
      }
      reader.checkProcessedBlockIds();
    } finally {
      reader.close();
    }
    if (!missing.isEmpty()) {
      throw new IllegalStateException(missing.size() + " blocks of partition " + partition + " did not come");
    }
  }

  /** Work of a thread, given its number. */
  private interface Task {
    void run(int number) throws Exception;
  }

  private void all(Task task) throws Exception {
    List<Future<?>> running = new ArrayList<>();
    for (int number = 0; number < shape.threads; number++) {
      int which = number;
      running.add(threads.submit(() -> {
        task.run(which);
        return null;
      }));
    }
    try {
      for (Future<?> one : running) {
        one.get();
      }
    } catch (ExecutionException e) {
      throw new IllegalStateException(e.getCause());
    }
  }

  @Override
  public void close() {
    threads.shutdownNow();
    client.unregisterShuffle(app);
    client.close();
  }
}
