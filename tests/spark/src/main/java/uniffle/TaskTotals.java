package uniffle;

import java.util.Map;
import org.apache.spark.executor.TaskMetrics;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerStageCompleted;
import org.apache.spark.scheduler.SparkListenerTaskEnd;
import org.apache.spark.scheduler.StageInfo;

/** Sums over the tasks of one scenario. A failed task or stage that a later attempt repaired is still counted. */
final class TaskTotals extends SparkListener {
  private long written;
  private long read;
  private long failed;
  private long failedStages;
  private double mapSeconds;

  @Override
  public synchronized void onTaskEnd(SparkListenerTaskEnd end) {
    if (!end.taskInfo().successful()) {
      failed++;
    }
    TaskMetrics metrics = end.taskMetrics();
    if (metrics != null) {
      written += metrics.shuffleWriteMetrics().bytesWritten();
      read += metrics.shuffleReadMetrics().totalBytesRead();
    }
  }

  @Override
  public synchronized void onStageCompleted(SparkListenerStageCompleted completed) {
    StageInfo stage = completed.stageInfo();
    if (stage.failureReason().isDefined()) {
      failedStages++;
    }
    boolean hasTimes = stage.submissionTime().isDefined() && stage.completionTime().isDefined();
    if (hasTimes && stage.taskMetrics().shuffleWriteMetrics().bytesWritten() > 0) {
      long took = (Long) stage.completionTime().get() - (Long) stage.submissionTime().get();
      mapSeconds += took / 1000.0;
    }
  }

  synchronized long failed() {
    return failed;
  }

  synchronized void report(Map<String, Object> line) {
    line.put("shuffle_written", written);
    line.put("shuffle_read", read);
    line.put("failed_tasks", failed);
    line.put("failed_stages", failedStages);
    line.put("map_stages_seconds", mapSeconds);
  }
}
