package uniffle;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.stream.Collectors;
import org.apache.spark.SparkConf;
import org.apache.spark.sql.SparkSession;

/**
 * Runs scenarios in Spark applications, one application after another in this JVM, and prints one JSON line for each
 * scenario and one for each application that has stopped.
 *
 * <p>A command is a list of arguments {@code key=value}:
 *
 * <ul>
 *   <li>{@code modes=vanilla,uniffle} the applications to run, in this order (default: both); {@code printed} is Uniffle
 *       with only the settings in the command, as printed by a worker
 *   <li>{@code scenarios=join,spill} (default: all but those for recordings, and {@code sized}, whose size is a setting)
 *   <li>{@code quorum=host:port} the coordinator, for mode uniffle
 *   <li>{@code client=GRPC} or {@code GRPC_NETTY}
 *   <li>{@code storage=MEMORY_LOCALFILE}, the client's {@code spark.rss.storage.type}
 *   <li>{@code master=local[2]}, or {@code local-cluster[2,1,1024]}
 *   <li>{@code failures=allowed} failed tasks do not fail the scenario (default: they do); {@code master=local[2,4]}
 *       retries them
 *   <li>any {@code spark.…=…}: a setting of the application; the last one wins
 * </ul>
 *
 * Arguments of the program form one command, and the exit code is 0 on success. Without arguments, commands are read
 * from standard input, one per line, so that the caller can inspect the worker between applications.
 *
 * <p>A run of a scenario through Uniffle must have the digest of the preceding run in mode vanilla, if there is one.
 */
public final class Main {
  private static final ObjectMapper JSON = new ObjectMapper();

  private final Map<Scenario, String> expected = new HashMap<>();
  private boolean allOk = true;

  private Main() {}

  /** See the class. */
  public static void main(String[] args) throws IOException {
    Main main = new Main();
    if (args.length > 0) {
      main.command(List.of(args));
    } else {
      BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
      for (String line = input.readLine(); line != null; line = input.readLine()) {
        main.command(List.of(line.trim().split(" +")));
      }
    }
    System.exit(main.allOk ? 0 : 1);
  }

  private void command(List<String> words) {
    Map<String, String> options = new LinkedHashMap<>();
    for (String word : words) {
      String[] pair = word.split("=", 2);
      options.put(pair[0], pair.length == 2 ? pair[1] : "");
    }
    try {
      List<Scenario> scenarios = scenarios(options.remove("scenarios"));
      String modes = options.remove("modes");
      for (String mode : (modes == null ? "vanilla,uniffle" : modes).split(",")) {
        application(mode, scenarios, new LinkedHashMap<>(options));
      }
    } catch (Exception e) { // see scenario()
      fail("command", String.join(" ", words), e);
    }
  }

  private static List<Scenario> scenarios(String names) {
    if (names == null) {
      List<Scenario> all = new ArrayList<>(List.of(Scenario.values()));
      all.removeIf(scenario -> scenario.name().startsWith("RECORDED") || scenario == Scenario.SIZED);
      return all;
    }
    List<Scenario> scenarios = new ArrayList<>();
    for (String name : names.split(",")) {
      scenarios.add(Scenario.valueOf(name.toUpperCase(Locale.ROOT)));
    }
    return scenarios;
  }

  private void application(String mode, List<Scenario> scenarios, Map<String, String> options) {
    long start = System.nanoTime();
    boolean mayFail = "allowed".equals(options.get("failures"));
    String id;
    SparkSession spark = SparkSession.builder().config(conf(mode, options)).getOrCreate();
    try {
      id = spark.sparkContext().applicationId();
      scenarios.forEach(scenario -> scenario(mode, scenario, spark, mayFail));
    } finally {
      spark.stop();
      SparkSession.clearActiveSession();
      SparkSession.clearDefaultSession();
    }
    Map<String, Object> line = new LinkedHashMap<>();
    line.put("event", "stopped");
    line.put("mode", mode);
    line.put("application", id);
    line.put("seconds", secondsSince(start));
    print(line);
  }

  private static SparkConf conf(String mode, Map<String, String> options) {
    SparkConf conf = new SparkConf(false)
        .setAppName("uniffle-worker-" + mode)
        .setMaster(options.getOrDefault("master", "local[2]"))
        .set("spark.ui.enabled", "false")
        .set("spark.driver.host", "127.0.0.1")
        .set("spark.driver.bindAddress", "127.0.0.1")
        .set("spark.local.dir", System.getProperty("java.io.tmpdir"))
        .set("spark.sql.session.timeZone", "UTC")
        .set("spark.serializer", "org.apache.spark.serializer.KryoSerializer");
    if (mode.equals("uniffle")) {
      String quorum = options.get("quorum");
      if (quorum == null) {
        throw new IllegalArgumentException("mode uniffle needs quorum=host:port");
      }
      conf.set("spark.shuffle.manager", "org.apache.spark.shuffle.RssShuffleManager")
          .set("spark.rss.coordinator.quorum", quorum)
          .set("spark.rss.client.type", options.getOrDefault("client", "GRPC"))
          .set("spark.rss.storage.type", options.getOrDefault("storage", "MEMORY_LOCALFILE"))
          .set("spark.shuffle.service.enabled", "false")
          .set("spark.sql.adaptive.localShuffleReader.enabled", "false");
    } else if (!mode.equals("vanilla") && !mode.equals("printed")) {
      throw new IllegalArgumentException("unknown mode " + mode);
    }
    if (conf.get("spark.master").startsWith("local-cluster")) {
      // Executors are JVMs of their own (SPARK_HOME must be set): the same classes and flags as here.
      String flags = ManagementFactory.getRuntimeMXBean().getInputArguments().stream()
          .filter(flag -> flag.startsWith("--add-opens") || flag.startsWith("-Dorg.apache.uniffle"))
          .collect(Collectors.joining(" "));
      conf.set("spark.executor.extraClassPath", System.getProperty("java.class.path"))
          .set("spark.executor.extraJavaOptions", flags);
    }
    options.forEach((key, value) -> {
      if (key.startsWith("spark.")) {
        conf.set(key, value);
      }
    });
    return conf;
  }

  private void scenario(String mode, Scenario scenario, SparkSession application, boolean mayFail) {
    String name = scenario.name().toLowerCase(Locale.ROOT);
    SparkSession spark = application.newSession();
    scenario.conf.forEach((key, value) -> spark.conf().set(key, value));
    TaskTotals totals = new TaskTotals();
    spark.sparkContext().addSparkListener(totals);
    long began = System.currentTimeMillis();
    long start = System.nanoTime();
    try {
      Outcome outcome = scenario.run(spark);
      double seconds = secondsSince(start);
      spark.sparkContext().listenerBus().waitUntilEmpty();
      compare(mode, scenario, outcome);
      outcome.check(mayFail || totals.failed() == 0, totals.failed() + " tasks failed");

      Map<String, Object> line = new LinkedHashMap<>();
      line.put("scenario", name);
      line.put("mode", mode);
      line.put("ok", outcome.error == null);
      line.put("seconds", seconds);
      line.put("spark", spark.version());
      line.put("began_ms", began);
      line.put("ended_ms", System.currentTimeMillis());
      line.put("digest", outcome.digest);
      line.putAll(outcome.notes);
      totals.report(line);
      if (outcome.error != null) {
        line.put("error", outcome.error);
        allOk = false;
      }
      print(line);
    } catch (Exception e) { // Spark throws checked exceptions that no signature names
      fail(name, mode, e);
    } finally {
      spark.sparkContext().removeSparkListener(totals);
    }
  }

  private void compare(String mode, Scenario scenario, Outcome outcome) {
    if (mode.equals("vanilla")) {
      expected.put(scenario, outcome.digest);
      return;
    }
    String vanilla = expected.get(scenario);
    outcome.note("compared", vanilla != null);
    if (vanilla != null) {
      outcome.check(vanilla.equals(outcome.digest), "vanilla Spark's digest is " + vanilla);
    }
  }

  private void fail(String scenario, String mode, Exception e) {
    allOk = false;
    e.printStackTrace();
    Map<String, Object> line = new LinkedHashMap<>();
    line.put("scenario", scenario);
    line.put("mode", mode);
    line.put("ok", false);
    line.put("error", String.valueOf(e));
    print(line);
  }

  private static double secondsSince(long start) {
    return Math.round((System.nanoTime() - start) / 1e6) / 1e3;
  }

  private static void print(Map<String, Object> line) {
    try {
      System.out.println(JSON.writeValueAsString(line));
      System.out.flush();
    } catch (JsonProcessingException e) {
      throw new IllegalStateException("a map of plain values is JSON", e);
    }
  }
}
