package uniffle.driver;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import org.apache.uniffle.common.ShuffleServerInfo;

/**
 * Writes shuffles through the published client library, reads them back with its composed reader and compares every
 * byte. Prints one JSON object per round with the resource usage of the server process.
 *
 * <p>Arguments are {@code key=value}:
 *
 * <ul>
 *   <li>{@code host=127.0.0.1 grpc=PORT tcp=PORT} the server; {@code tcp} is needed for GRPC_NETTY
 *   <li>{@code pid=PID} of the server on this machine
 *   <li>{@code client=GRPC} or {@code GRPC_NETTY}
 *   <li>{@code rounds=3 bytes=3140000000 partitions=200 threads=4 block=14336 send=14680064 spread=8} data per
 *       round and its shape; a send of {@code send} bytes goes to {@code spread} partitions
 *   <li>{@code wait=10000} longest pause in ms after NO_BUFFER ({@code rss.client.retry.interval.max}; Spark's default)
 * </ul>
 */
public final class Main {
  private Main() {}

  /** See the class. */
  public static void main(String[] words) {
    try {
      run(options(words));
      System.exit(0); // the client's pools have non-daemon threads
    } catch (Exception e) { // the client may throw anything
      e.printStackTrace();
      System.err.println("driver: " + String.valueOf(e).replace('\n', ' '));
      System.exit(1);
    }
  }

  private static Map<String, String> options(String[] words) {
    Map<String, String> options = new HashMap<>();
    for (String word : words) {
      String[] pair = word.split("=", 2);
      if (pair.length != 2) {
        throw new IllegalArgumentException(word + " is not key=value");
      }
      options.put(pair[0], pair[1]);
    }
    return options;
  }

  private static void run(Map<String, String> options) throws Exception {
    String host = options.getOrDefault("host", "127.0.0.1");
    String clientType = options.getOrDefault("client", "GRPC");
    int grpc = Integer.parseInt(required(options, "grpc"));
    boolean netty = clientType.equals("GRPC_NETTY");
    ShuffleServerInfo server = netty
        ? new ShuffleServerInfo(host, grpc, Integer.parseInt(required(options, "tcp")))
        : new ShuffleServerInfo(host, grpc);
    Shape shape = Shape.of(options);
    Process process = new Process(Integer.parseInt(required(options, "pid")));
    int rounds = Integer.parseInt(options.getOrDefault("rounds", "3"));
    long wait = Long.parseLong(options.getOrDefault("wait", "10000"));
    try (Shuffles shuffles = new Shuffles(clientType, server, shape, wait)) {
      for (int round = 0; round < rounds; round++) {
        Phase write = Phase.of(process, () -> shuffles.write());
        Phase read = Phase.of(process, () -> shuffles.read());
        shuffles.unregister();
        List<String> fields = new ArrayList<>();
        fields.add("\"client\":\"" + clientType + "\"");
        fields.add("\"round\":" + (round + 1));
        fields.add("\"bytes\":" + shape.bytes());
        fields.add("\"blocks\":" + shape.blocks());
        fields.add(write.json("write", shape.bytes()));
        fields.add(read.json("read", shape.bytes()));
        fields.add(String.format(Locale.ROOT, "\"peak_rss_mib\":%d", process.peakRssBytes() >> 20));
        System.out.println("{" + String.join(",", fields) + "}");
        System.out.flush();
      }
    }
  }

  private static String required(Map<String, String> options, String key) {
    String value = options.get(key);
    if (value == null) {
      throw new IllegalArgumentException(key + "=… is missing");
    }
    return value;
  }
}
