package uniffle.driver;

import java.util.Locale;

/** Time and resource usage of one half of a round. */
final class Phase {
  /** A half of a round. */
  interface Work {
    /** Any exception ends the run. */
    void run() throws Exception;
  }

  private final double seconds;
  private final double cpuSeconds;

  private Phase(double seconds, double cpuSeconds) {
    this.seconds = seconds;
    this.cpuSeconds = cpuSeconds;
  }

  static Phase of(Process process, Work work) throws Exception {
    double before = process.cpuSecondsAtRest();
    long start = System.nanoTime();
    work.run();
    double seconds = (System.nanoTime() - start) / 1e9;
    return new Phase(seconds, process.cpuSecondsAtRest() - before);
  }

  String json(String name, long bytes) {
    return String.format(
        Locale.ROOT,
        "\"%1$s_cpu_s_per_gb\":%2$.3f,\"%1$s_gb_per_s\":%3$.3f",
        name, cpuSeconds / (bytes / 1e9), bytes / 1e9 / seconds);
  }
}
