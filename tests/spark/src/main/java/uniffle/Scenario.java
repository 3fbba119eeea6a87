package uniffle;

import static org.apache.spark.sql.functions.col;
import static org.apache.spark.sql.functions.expr;

import java.io.IOException;
import java.io.Serializable;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.stream.LongStream;
import org.apache.spark.HashPartitioner;
import org.apache.spark.api.java.JavaPairRDD;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.api.java.JavaSparkContext;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.Column;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.execution.PartialReducerPartitionSpec;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.adaptive.AQEShuffleReadExec;
import org.apache.spark.sql.execution.adaptive.AdaptiveSparkPlanExec;
import org.apache.spark.sql.execution.adaptive.QueryStageExec;
import org.apache.spark.storage.StorageLevel;
import scala.Function1;
import scala.Tuple2;
import scala.collection.Iterator;
import scala.collection.JavaConverters;
import scala.reflect.ClassTag;
import scala.reflect.ClassTag$;

/**
 * The jobs. Rows are derived from row numbers and their hashes, so they are equal in every run and mode. No job adds
 * floating-point numbers, whose sums depend on the order of rows.
 */
enum Scenario {
  /** 10,000,000 rows of 100 random bytes in 64 map tasks, sorted into 64 partitions. */
  SORT_1G(Map.of("spark.sql.adaptive.enabled", "false", "spark.sql.shuffle.partitions", "64")) {
    @Override
    Outcome run(SparkSession spark) {
      return sorted(Digest.ofSorted(randomRows(spark, 10_000_000, 64).sort("key")), 10_000_000);
    }
  },

  /** A sort of pairs of the RDD API, which Kryo serialises: the second path through the client's writer. */
  SORT_SMALL(Map.of()) {
    @Override
    Outcome run(SparkSession spark) {
      long rows = 300_000;
      JavaRDD<Tuple2<String, String>> result = ids(spark, rows, 16)
          .mapToPair(id -> new Tuple2<>(String.format("%016x", mix(id)), "value " + id))
          .sortByKey(true, 16)
          .map(pair -> pair);
      return sorted(Digest.of(result, new Pairs()), rows);
    }
  },

  /**
   * 600,000 rows into 150,000 groups with 22 aggregates each, then a count of distinct values over them: three
   * shuffles, and AQE coalesces the small partitions of the later ones into reads of several partitions.
   */
  WIDE_AGGREGATION(Map.of(
      "spark.sql.adaptive.enabled", "true",
      "spark.sql.adaptive.advisoryPartitionSizeInBytes", "8m",
      "spark.sql.shuffle.partitions", "48")) {
    @Override
    Outcome run(SparkSession spark) {
      List<Column> values = new ArrayList<>();
      values.add(expr("pmod(xxhash64(id, 1L), 150000L) AS key"));
      IntStream.range(0, 7).forEach(n ->
          values.add(expr("shiftrightunsigned(xxhash64(id, " + (100 + n) + "L), 24) AS v" + n)));
      List<Column> aggregates = IntStream.range(0, 7)
          .mapToObj(n -> List.of("sum", "min", "max").stream()
              .map(function -> expr(function + "(v" + n + ") AS " + function + n)))
          .flatMap(stream -> stream)
          .collect(Collectors.toList());
      Dataset<Row> wide = spark.range(0, 600_000, 1, 24).select(values.toArray(new Column[0]))
          .groupBy("key").agg(expr("count(*) AS rows"), aggregates.toArray(new Column[0]));
      Dataset<Row> narrow = wide.groupBy(expr("key % 1000 AS family"))
          .agg(expr("count(DISTINCT max0) AS peaks"), expr("sum(sum1) AS total"), expr("max(rows) AS most"));
      Digest groups = Digest.of(wide);
      Digest families = Digest.of(narrow);
      return new Outcome(groups + "+" + families)
          .check(families.rows == 1000, families.rows + " families instead of 1000")
          .note("rows", groups.rows);
    }
  },

  /** Sort-merge joins of 600,000 rows with 200,000 and with 50,000, the last one outer, with text columns. */
  JOIN(Map.of(
      "spark.sql.adaptive.enabled", "false",
      "spark.sql.autoBroadcastJoinThreshold", "-1",
      "spark.sql.shuffle.partitions", "32")) {
    @Override
    Outcome run(SparkSession spark) {
      Dataset<Row> orders = spark.range(0, 600_000, 1, 16).select(
          col("id").as("order"),
          expr("pmod(xxhash64(id, 2L), 250000L) AS customer"),
          expr("pmod(xxhash64(id, 3L), 60000L) AS item"),
          expr("concat('order ', hex(xxhash64(id, 4L))) AS text"));
      Dataset<Row> customers = spark.range(0, 200_000, 1, 8).select(
          col("id").as("customer"), expr("concat('customer ', sha1(cast(id AS string))) AS name"));
      Dataset<Row> items = spark.range(0, 50_000, 1, 4).select(
          col("id").as("item"), expr("concat('item ', md5(cast(id AS string))) AS label"));
      Digest digest = Digest.of(orders.join(customers, "customer").join(items,
          scala.collection.JavaConverters.asScalaBuffer(List.of("item")).toSeq(), "left_outer"));
      return new Outcome(digest.toString())
          .check(digest.rows > 450_000 && digest.rows < 510_000, "expected 480 thousand rows, not " + digest.rows)
          .note("rows", digest.rows);
    }
  },

  /**
   * A join in which two thirds of the rows have one key. AQE splits that partition by map tasks, so its reads filter
   * by task attempt (LOCAL_ORDER, expectedTaskIds). It is an error if nothing was split.
   */
  SKEW_JOIN_AQE(Map.of(
      "spark.sql.adaptive.enabled", "true",
      "spark.sql.adaptive.skewJoin.enabled", "true",
      "spark.sql.adaptive.skewJoin.skewedPartitionFactor", "2",
      "spark.sql.adaptive.skewJoin.skewedPartitionThresholdInBytes", "4m",
      "spark.sql.adaptive.advisoryPartitionSizeInBytes", "4m",
      "spark.sql.autoBroadcastJoinThreshold", "-1",
      "spark.sql.shuffle.partitions", "16")) {
    @Override
    Outcome run(SparkSession spark) {
      Dataset<Row> facts = spark.range(0, 900_000, 1, 24).select(
          expr("if(id % 3 < 2, 7L, pmod(xxhash64(id, 5L), 100000L)) AS key"),
          expr(randomBytes(6, 40) + " AS payload"));
      Dataset<Row> names = spark.range(0, 200_000, 1, 8).select(
          col("id").as("key"), expr("sha1(cast(id AS string)) AS name"));
      Dataset<Row> joined = facts.join(names, "key");
      Digest digest = Digest.of(joined);
      long pieces = skewedPieces(joined.queryExecution().executedPlan());
      return new Outcome(digest.toString())
          .check(digest.rows == 900_000, digest.rows + " rows instead of 900000")
          .check(pieces >= 2, "AQE did not split the skewed partition: " + joined.queryExecution().executedPlan())
          .note("rows", digest.rows)
          .note("skewed_pieces", pieces);
    }
  },

  /**
   * 4,000,000 rows of 100 random bytes dealt by hash to 32 partitions: about 440 MB on the wire, for a
   * worker with a quarter of that as memory.
   */
  SPILL(Map.of("spark.sql.adaptive.enabled", "false")) {
    @Override
    Outcome run(SparkSession spark) {
      Digest digest = Digest.of(randomRows(spark, 4_000_000, 32).repartition(32, col("key")));
      return new Outcome(digest.toString())
          .check(digest.rows == 4_000_000, digest.rows + " rows instead of 4000000")
          .note("rows", digest.rows);
    }
  },

  /**
   * As {@link #SPILL} with {@code spark.scenario.rows} rows, 20,000 per map task, dealt to 16 partitions. Repeated for
   * {@code spark.scenario.seconds}, at least once: for concurrent applications.
   */
  SIZED(Map.of("spark.sql.adaptive.enabled", "false")) {
    @Override
    Outcome run(SparkSession spark) {
      long rows = Long.parseLong(spark.sparkContext().getConf().get("spark.scenario.rows"));
      long seconds = Long.parseLong(spark.sparkContext().getConf().get("spark.scenario.seconds", "0"));
      int tasks = (int) Math.max(1, rows / 20_000);
      long until = System.nanoTime() + seconds * 1_000_000_000;
      int rounds = 0;
      Digest digest;
      do {
        digest = Digest.of(randomRows(spark, rows, tasks).repartition(16, col("key")));
        rounds++;
      } while (System.nanoTime() < until);
      return new Outcome(digest.toString())
          .check(digest.rows == rows, digest.rows + " rows instead of " + rows)
          .note("rounds", rounds);
    }
  },

  /** As {@link #SPILL} with 1,500,000 rows in 48 map tasks, about 165 MB: for upgrades and kills during the job. */
  RESTARTS(Map.of("spark.sql.adaptive.enabled", "false")) {
    @Override
    Outcome run(SparkSession spark) {
      Digest digest = Digest.of(randomRows(spark, 1_500_000, 48).repartition(24, col("key")));
      return new Outcome(digest.toString())
          .check(digest.rows == 1_500_000, digest.rows + " rows instead of 1500000");
    }
  },

  /**
   * 200,000 pairs from 4 map tasks. One partition is read, then the job pauses if configured ({@link #pause}), then all
   * partitions are read. The data fits into a worker's memory.
   */
  PAUSED(Map.of()) {
    @Override
    Outcome run(SparkSession spark) {
      return paused(spark, ids(spark, 200_000, 4));
    }
  },

  /** Like {@link #PAUSED}, from a barrier stage of 2 tasks, which is recomputed when this client fails to fetch. */
  PAUSED_BARRIER(Map.of()) {
    @Override
    Outcome run(SparkSession spark) {
      Function1<Iterator<Long>, Iterator<Long>> same =
          (Function1<Iterator<Long>, Iterator<Long>> & Serializable) rows -> rows;
      ClassTag<Long> tag = ClassTag$.MODULE$.apply(Long.class);
      RDD<Long> together = ids(spark, 200_000, 2).rdd().barrier().mapPartitions(same, false, tag);
      return paused(spark, together.toJavaRDD());
    }
  },

  /** A cached aggregation, read from the cache, then from its shuffle again after the cache is dropped. */
  CACHED_RDD(Map.of()) {
    @Override
    Outcome run(SparkSession spark) {
      JavaPairRDD<Long, Long> sums = ids(spark, 200_000, 8)
          .mapToPair(id -> new Tuple2<>(Math.floorMod(mix(id), 20_000L), id))
          .reduceByKey(Long::sum, 12);
      JavaRDD<String> texts = sums.map(pair -> pair._1 + "=" + pair._2);
      sums.persist(StorageLevel.MEMORY_AND_DISK());
      Digest computed = Digest.of(texts, new Texts());
      Digest cached = Digest.of(texts, new Texts());
      Digest regrouped = Digest.of(
          sums.mapToPair(pair -> new Tuple2<>(pair._1 % 100, pair._2)).reduceByKey(Long::sum, 5)
              .map(pair -> pair._1 + "=" + pair._2),
          new Texts());
      sums.unpersist(true);
      // The map stage is skipped: the blocks must still be on the worker.
      Digest reread = Digest.of(texts, new Texts());
      return new Outcome(computed + "+" + regrouped)
          .check(cached.toString().equals(computed.toString()), "the cache has other rows")
          .check(reread.toString().equals(computed.toString()), "the second read of the shuffle has other rows")
          .note("rows", computed.rows);
    }
  },

  /** groupByKey of one RDD, and a cogroup of it with another; the order within a group is not compared. */
  COGROUP(Map.of()) {
    @Override
    Outcome run(SparkSession spark) {
      JavaPairRDD<String, Long> left = ids(spark, 120_000, 6)
          .mapToPair(id -> new Tuple2<>("key " + Math.floorMod(mix(id), 9_000L), id));
      JavaPairRDD<String, String> right = ids(spark, 60_000, 5)
          .mapToPair(id -> new Tuple2<>("key " + Math.floorMod(mix(-id), 12_000L), "value " + id));
      Digest groups = Digest.of(
          left.groupByKey(7).map(group -> group._1 + sortedText(group._2)), new Texts());
      Digest cogroups = Digest.of(
          left.cogroup(right, 9)
              .map(group -> group._1 + sortedText(group._2._1) + sortedText(group._2._2)),
          new Texts());
      return new Outcome(groups + "+" + cogroups)
          .check(cogroups.rows > groups.rows, "keys of the right side alone are missing")
          .note("rows", cogroups.rows);
    }
  },

  /** 400,000 rows of 100 bytes dealt by ranges of their key, each partition then sorted. */
  RANGE_SORT(Map.of("spark.sql.adaptive.enabled", "false")) {
    @Override
    Outcome run(SparkSession spark) {
      Dataset<Row> ranges = randomRows(spark, 400_000, 10).repartitionByRange(16, col("key"));
      return sorted(Digest.ofSorted(ranges.sortWithinPartitions("key")), 400_000);
    }
  },

  /**
   * A million blocks of one record each: 1,000 map tasks write one for each of 1,000 reducers. Vanilla Spark
   * uses eight map tasks for the same records: a million small reads from its files would take a minute.
   */
  TINY_PARTITIONS(Map.of()) {
    @Override
    Outcome run(SparkSession spark) {
      int side = 1000;
      boolean uniffle = spark.sparkContext().getConf().contains("spark.shuffle.manager");
      JavaRDD<String> moved = ids(spark, side, uniffle ? side : 8)
          .flatMapToPair(task -> IntStream.range(0, side)
              .mapToObj(to -> new Tuple2<>(to, (int) (task * side) + to)).iterator())
          .partitionBy(new HashPartitioner(side))
          .map(pair -> pair._1 + "=" + pair._2);
      Digest digest = Digest.of(moved, new Texts());
      return new Outcome(digest.toString())
          .check(digest.rows == side * side, digest.rows + " rows instead of a million")
          .note("rows", digest.rows);
    }
  },

  /** Four million rows from a thousand map tasks to a thousand partitions, four rows a block. */
  REPARTITION_1000(Map.of("spark.sql.adaptive.enabled", "false", "spark.sql.shuffle.partitions", "1000")) {
    @Override
    Outcome run(SparkSession spark) {
      long rows = 4_000_000;
      Row sums = spark.range(0, rows, 1, 1000)
          .selectExpr("id", "hash(id) AS value")
          .repartition(1000, col("id"))
          .selectExpr("count(*)", "sum(id)", "sum(value)", "bit_xor(value)")
          .first();
      return new Outcome(sums.mkString(" ")).check(sums.getLong(0) == rows, sums.getLong(0) + " rows");
    }
  },

  /** A query of four shuffles with its static plan. */
  QUERY_AQE_OFF(Map.of(
      "spark.sql.adaptive.enabled", "false",
      "spark.sql.autoBroadcastJoinThreshold", "-1",
      "spark.sql.shuffle.partitions", "12")) {
    @Override
    Outcome run(SparkSession spark) {
      return query(spark);
    }
  },

  /** The same query, re-planned while it runs: partitions are coalesced. */
  QUERY_AQE_ON(Map.of(
      "spark.sql.adaptive.enabled", "true",
      "spark.sql.autoBroadcastJoinThreshold", "-1",
      "spark.sql.adaptive.autoBroadcastJoinThreshold", "-1",
      "spark.sql.adaptive.advisoryPartitionSizeInBytes", "1m",
      "spark.sql.shuffle.partitions", "12")) {
    @Override
    Outcome run(SparkSession spark) {
      return query(spark);
    }
  },

  /** Few rows, for recordings: a sorted aggregation of pairs with values that compress badly. */
  RECORDED_PAIRS(Map.of()) {
    @Override
    Outcome run(SparkSession spark) {
      JavaRDD<String> result = ids(spark, 160, 3)
          .mapToPair(id -> new Tuple2<>(mix(id) >>> 57, Long.toHexString(mix(id * 31))))
          .reduceByKey((a, b) -> a.compareTo(b) < 0 ? a + b : b + a, 4)
          .sortByKey(true, 3)
          .map(pair -> pair._1.toString());
      Digest digest = Digest.of(result, new Texts());
      return new Outcome(digest.toString()).note("rows", digest.rows);
    }
  },

  /** Few rows, for recordings: a skewed join whose reads filter by task attempt. */
  RECORDED_SKEW(Map.of(
      "spark.sql.adaptive.enabled", "true",
      "spark.sql.adaptive.skewJoin.skewedPartitionFactor", "1.2",
      "spark.sql.adaptive.skewJoin.skewedPartitionThresholdInBytes", "2k",
      "spark.sql.adaptive.advisoryPartitionSizeInBytes", "2k",
      "spark.sql.adaptive.coalescePartitions.enabled", "false",
      "spark.sql.autoBroadcastJoinThreshold", "-1",
      "spark.sql.shuffle.partitions", "3")) {
    @Override
    Outcome run(SparkSession spark) {
      Dataset<Row> facts = spark.range(0, 270, 1, 4).select(
          expr("if(id % 3 < 2, 7L, pmod(xxhash64(id, 5L), 40L)) AS key"), expr(randomBytes(6, 40) + " AS payload"));
      Dataset<Row> names = spark.range(0, 44, 1, 2).select(
          col("id").as("key"), expr("sha1(cast(id AS string)) AS name"));
      Dataset<Row> joined = facts.join(names, "key");
      Digest digest = Digest.of(joined);
      return new Outcome(digest.toString())
          .note("rows", digest.rows)
          .note("skewed_pieces", skewedPieces(joined.queryExecution().executedPlan()));
    }
  };

  /** Settings of Spark SQL that belong to the scenario. */
  final Map<String, String> conf;

  Scenario(Map<String, String> conf) {
    this.conf = conf;
  }

  abstract Outcome run(SparkSession spark);

  /** Returns the numbers below {@code rows} in {@code tasks} partitions. */
  private static JavaRDD<Long> ids(SparkSession spark, long rows, long tasks) {
    return new JavaSparkContext(spark.sparkContext())
        .parallelize(LongStream.range(0, tasks).boxed().collect(Collectors.toList()), (int) tasks)
        .flatMap(part -> LongStream.range(part * rows / tasks, (part + 1) * rows / tasks).iterator());
  }

  private static Outcome paused(SparkSession spark, JavaRDD<Long> ids) {
    JavaRDD<String> texts = ids
        .mapToPair(id -> new Tuple2<>(mix(id), "value " + id))
        .partitionBy(new HashPartitioner(8))
        .map(pair -> pair._1 + "=" + pair._2);
    // Computes the map stage; later jobs skip it.
    int first = texts.take(1).size();
    pause(spark);
    Digest digest = Digest.of(texts, new Texts());
    return new Outcome(digest.toString())
        .check(first == 1, "the first partition is empty")
        .check(digest.rows == 200_000, digest.rows + " rows instead of 200000");
  }

  /**
   * If {@code spark.uniffle.pause} names a directory, creates {@code reached} in it and waits for {@code go}. The wait
   * ends if the directory is deleted, as after a failed test.
   */
  private static void pause(SparkSession spark) {
    String name = spark.sparkContext().getConf().get("spark.uniffle.pause", "");
    if (name.isEmpty()) {
      return;
    }
    Path directory = Path.of(name);
    try {
      Files.createFile(directory.resolve("reached"));
      while (!Files.exists(directory.resolve("go"))) {
        if (!Files.exists(directory)) {
          throw new IllegalStateException("nobody waits any more for what this job does");
        }
        Thread.sleep(20);
      }
    } catch (IOException | InterruptedException e) {
      throw new IllegalStateException(e);
    }
  }

  private static Outcome query(SparkSession spark) {
    Dataset<Row> sales = spark.range(0, 240_000, 1, 8).select(
        expr("pmod(xxhash64(id, 11L), 30000L) AS item"), expr("pmod(xxhash64(id, 12L), 1000000L) AS price"));
    Dataset<Row> items = spark.range(0, 25_000, 1, 4).select(
        col("id").as("item"), expr("pmod(xxhash64(id, 13L), 700L) AS shop"));
    Dataset<Row> shops = sales.join(items, "item")
        .groupBy("shop").agg(expr("sum(price) AS revenue"), expr("count(DISTINCT item) AS items"))
        .sort("revenue", "shop");
    Digest digest = Digest.of(shops);
    return new Outcome(digest.toString())
        .check(digest.rows == 700, digest.rows + " shops instead of 700")
        .note("rows", digest.rows);
  }

  private static <T extends Comparable<T>> String sortedText(Iterable<T> values) {
    List<T> sorted = new ArrayList<>();
    values.forEach(sorted::add);
    sorted.sort(null);
    return sorted.toString();
  }

  /** Rows of a 10-byte key and a 90-byte value that no codec can compress. */
  private static Dataset<Row> randomRows(SparkSession spark, long rows, int tasks) {
    return spark.range(0, rows, 1, tasks).select(
        expr(randomBytes(10, 10) + " AS key"), expr(randomBytes(20, 90) + " AS value"));
  }

  private static String randomBytes(int seed, int length) {
    String words = IntStream.range(0, (length + 7) / 8)
        .mapToObj(n -> "cast(xxhash64(id, " + (seed + n) + "L) AS binary)")
        .collect(Collectors.joining(", "));
    return "substring(concat(" + words + "), 1, " + length + ")";
  }

  /** A bijection of longs (the finaliser of SplitMix64), so that keys are distinct and unordered. */
  private static long mix(long value) {
    long z = value + 0x9e3779b97f4a7c15L;
    z = (z ^ (z >>> 30)) * 0xbf58476d1ce4e5b9L;
    z = (z ^ (z >>> 27)) * 0x94d049bb133111ebL;
    return z ^ (z >>> 31);
  }

  private static Outcome sorted(Digest digest, long rows) {
    return new Outcome(digest.toString())
        .check(digest.ordered, "rows are out of order")
        .check(digest.rows == rows, digest.rows + " rows instead of " + rows)
        .note("rows", digest.rows);
  }

  /** Returns the number of pieces in which AQE reads skewed partitions, over all shuffle reads of the final plan. */
  private static long skewedPieces(SparkPlan plan) {
    if (plan instanceof AdaptiveSparkPlanExec) {
      return skewedPieces(((AdaptiveSparkPlanExec) plan).executedPlan());
    }
    if (plan instanceof QueryStageExec) {
      return skewedPieces(((QueryStageExec) plan).plan());
    }
    long pieces = 0;
    if (plan instanceof AQEShuffleReadExec) {
      pieces = JavaConverters.seqAsJavaList(((AQEShuffleReadExec) plan).partitionSpecs()).stream()
          .filter(spec -> spec instanceof PartialReducerPartitionSpec)
          .count();
    }
    for (SparkPlan child : JavaConverters.seqAsJavaList(plan.children())) {
      pieces += skewedPieces(child);
    }
    return pieces;
  }

  private static final class Pairs implements Digest.Rows<Tuple2<String, String>> {
    private static final long serialVersionUID = 1L;

    @Override
    public long hash(Tuple2<String, String> pair) {
      return Digest.hash((pair._1 + "=" + pair._2).getBytes(java.nio.charset.StandardCharsets.UTF_8));
    }

    @Override
    public byte[] key(Tuple2<String, String> pair) {
      return pair._1.getBytes(java.nio.charset.StandardCharsets.UTF_8);
    }
  }

  private static final class Texts implements Digest.Rows<String> {
    private static final long serialVersionUID = 1L;

    @Override
    public long hash(String text) {
      return Digest.hash(text.getBytes(java.nio.charset.StandardCharsets.UTF_8));
    }

    @Override
    public byte[] key(String text) {
      return null;
    }
  }
}
