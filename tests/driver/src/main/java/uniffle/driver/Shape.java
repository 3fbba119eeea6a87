package uniffle.driver;

import java.util.Map;

/** Amount of data and its division into sends. All sends have equal size, and tasks share them evenly. */
final class Shape {
  final int partitions;
  final int threads;
  final int blockBytes;
  /** Blocks of one send to one partition. */
  final int run;
  /** Partitions of one send. */
  final int spread;
  final int sendsPerTask;

  private Shape(Map<String, String> options) {
    partitions = number(options, "partitions", 200);
    threads = number(options, "threads", 4);
    blockBytes = number(options, "block", 14 << 10);
    spread = Math.min(number(options, "spread", 8), partitions);
    run = Math.max(1, number(options, "send", 14 << 20) / blockBytes / spread);
    long bytes = Long.parseLong(options.getOrDefault("bytes", "3140000000"));
    sendsPerTask = Math.toIntExact(Math.max(1, Math.round((double) bytes / sendBytes() / threads)));
    if (blockBytes < Long.BYTES) {
      throw new IllegalArgumentException("block must have room for its id");
    }
  }

  static Shape of(Map<String, String> options) {
    return new Shape(options);
  }

  private static int number(Map<String, String> options, String key, int otherwise) {
    int value = Integer.parseInt(options.getOrDefault(key, String.valueOf(otherwise)));
    if (value < 1) {
      throw new IllegalArgumentException(key + " must be at least 1");
    }
    return value;
  }

  private long sendBytes() {
    return (long) run * spread * blockBytes;
  }

  long blocks() {
    return (long) threads * sendsPerTask * run * spread;
  }

  long bytes() {
    return blocks() * blockBytes;
  }

  /** Returns partition number {@code n} of a send of a task. */
  int partition(int task, int send, int n) {
    long sends = (long) task * sendsPerTask + send;
    return (int) ((sends * spread + n) % partitions);
  }
}
