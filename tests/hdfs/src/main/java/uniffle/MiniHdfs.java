package uniffle;

import java.io.BufferedReader;
import java.io.File;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.LocatedFileStatus;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RemoteIterator;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.hdfs.DistributedFileSystem;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.hdfs.MiniDFSNNTopology;
import org.apache.hadoop.hdfs.protocol.HdfsConstants.SafeModeAction;
import org.apache.hadoop.security.UserGroupInformation;

/**
 * NameNode and DataNodes in one JVM. The first argument is the directory for their files, the others are settings
 * {@code key=value}. With {@code ha} among them there are two NameNodes of one nameservice, the first one active. Prints
 * {@code ready <port>…}, a port for each NameNode, once they serve; then every line of standard input is a command, and every
 * response is a line {@code ok …} or {@code failed …}. Ends with standard input.
 */
public final class MiniHdfs {
  private final MiniDFSCluster cluster;
  private final Configuration conf;
  private final List<FSDataOutputStream> abandoned = new ArrayList<>();
  private MiniDFSCluster.DataNodeProperties stopped;
  /** Index of the NameNode that receives commands. */
  private int active;

  private MiniHdfs(MiniDFSCluster cluster, Configuration conf) {
    this.cluster = cluster;
    this.conf = conf;
  }

  /** See the class. */
  public static void main(String[] args) throws Exception {
    Configuration conf = new Configuration();
    conf.set(MiniDFSCluster.HDFS_MINIDFS_BASEDIR, new File(args[0]).getAbsolutePath());
    // Detects a killed DataNode and releases its port within seconds.
    conf.setInt("dfs.namenode.heartbeat.recheck-interval", 500);
    conf.setInt("dfs.heartbeat.interval", 1);
    conf.setInt("dfs.namenode.fs-limits.min-block-size", 4096);
    int dataNodes = 1;
    boolean ha = false;
    for (int i = 1; i < args.length; i++) {
      String[] pair = args[i].split("=", 2);
      if (pair[0].equals("datanodes")) {
        dataNodes = Integer.parseInt(pair[1]);
      } else if (pair[0].equals("ha")) {
        ha = true;
        conf.setBoolean("dfs.ha.standby.checkpoints", false);
      } else {
        conf.set(pair[0], pair[1]);
      }
    }
    conf.setIfUnset("dfs.replication", "1");
    UserGroupInformation.setConfiguration(conf);
    MiniDFSCluster.Builder builder = new MiniDFSCluster.Builder(conf).numDataNodes(dataNodes).format(true);
    String port = conf.get("uniffle.namenode.port");
    if (port != null) {
      builder = builder.nameNodePort(Integer.parseInt(port));
    }
    if (conf.get("hadoop.security.authentication", "simple").equals("kerberos")) {
      builder = builder.checkDataNodeAddrConfig(true);
    }
    if (ha) {
      builder = builder.nnTopology(MiniDFSNNTopology.simpleHATopology());
    }
    MiniDFSCluster cluster = builder.build();
    if (ha) {
      cluster.transitionToActive(0);
    }
    cluster.waitActive(0);
    System.out.println(
        "ready " + cluster.getNameNodePort(0) + (ha ? " " + cluster.getNameNodePort(1) : ""));
    MiniHdfs hdfs = new MiniHdfs(cluster, conf);
    BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = input.readLine(); line != null; line = input.readLine()) {
      String answer;
      try {
        answer = "ok " + hdfs.command(line.trim().split(" "));
      } catch (Exception | LinkageError e) { // every failure is reported to the test
        e.printStackTrace();
        answer = "failed " + e.toString().replace('\n', ' ');
      }
      System.out.println(answer);
      System.out.flush();
    }
    Runtime.getRuntime().halt(0);
  }

  private String command(String[] words) throws IOException, InterruptedException {
    switch (words[0]) {
      case "stop-datanode":
        stopped = cluster.stopDataNode(0);
        return "";
      case "start-datanode":
        cluster.restartDataNode(stopped, true);
        cluster.waitActive();
        return "";
      case "stop-namenode":
        cluster.shutdownNameNode(0);
        return "";
      case "start-namenode":
        cluster.restartNameNode(0, true);
        return "";
      case "fail-over":
        // The active NameNode dies; the other takes over from the shared edits.
        cluster.shutdownNameNode(0);
        cluster.transitionToActive(1);
        active = 1;
        return "";
      case "safe-mode":
        cluster.getFileSystem(active).setSafeMode(words[1].equals("on") ? SafeModeAction.SAFEMODE_ENTER : SafeModeAction.SAFEMODE_LEAVE);
        return "";
      case "mkdirs":
        return String.valueOf(cluster.getFileSystem(active).mkdirs(new Path(words[1])));
      case "chmod":
        cluster.getFileSystem(active).setPermission(new Path(words[2]), new FsPermission(words[1]));
        return "";
      case "chown":
        cluster.getFileSystem(active).setOwner(new Path(words[2]), words[1], null);
        return "";
      case "quota":
        // Bytes, -1 = none.
        cluster.getFileSystem(active).setQuota(new Path(words[1]), Long.MAX_VALUE - 1, bytes(words[2]));
        return "";
      case "leave-open":
        // Like a writer killed during an append: half a record and an unreleased lease.
        FSDataOutputStream torn = cluster.getFileSystem(active).append(new Path(words[1]));
        torn.write(new byte[20]);
        torn.hflush();
        abandoned.add(torn);
        return "";
      case "list":
        return list(cluster.getFileSystem(active), new Path(words[1]));
      case "put":
        return put(new File(words[1]), new Path(words[2]), Integer.parseInt(words[3]));
      default:
        throw new IllegalArgumentException("no such command");
    }
  }

  private static long bytes(String text) {
    long value = Long.parseLong(text);
    return value < 0 ? org.apache.hadoop.hdfs.protocol.HdfsConstants.QUOTA_RESET : value;
  }

  /** Lists every file below a directory as {@code path|length|owner}, separated by spaces. */
  private static String list(DistributedFileSystem fs, Path directory) throws IOException {
    StringBuilder text = new StringBuilder();
    try {
      RemoteIterator<LocatedFileStatus> files = fs.listFiles(directory, true);
      while (files.hasNext()) {
        LocatedFileStatus file = files.next();
        text.append(file.getPath().toUri().getPath()).append('|').append(file.getLen()).append('|')
            .append(file.getOwner()).append(' ');
      }
    } catch (FileNotFoundException gone) {
      // The directory, or one below it, does not exist or was just removed. Returns the files found before.
    }
    return text.toString().trim();
  }

  /** Copies a local file {@code times} times like {@code hdfs dfs -put}. Returns the duration in milliseconds. */
  private String put(File local, Path remote, int times) throws IOException {
    try (FileSystem fs = FileSystem.newInstance(URI.create("hdfs://127.0.0.1:" + cluster.getNameNodePort()), conf)) {
      long start = System.nanoTime();
      for (int i = 0; i < times; i++) {
        fs.copyFromLocalFile(false, true, new Path(local.toURI()), new Path(remote, "put-" + i));
      }
      return String.valueOf((System.nanoTime() - start) / 1_000_000);
    }
  }
}
