use super::*;

/// Counters as testpmd 22.11 prints them.
const STATS: &str = " show port stats all

  ######################## NIC statistics for port 0  ########################
  RX-packets: 0          RX-missed: 0          RX-bytes:  0
  RX-errors: 0
  RX-nombuf:  0         
  TX-packets: 9136992    TX-errors: 0          TX-bytes:  584767488

  Throughput (since last show)
  Rx-pps:            0          Rx-bps:            0
  Tx-pps:      5880287          Tx-bps:   3010707432
  ############################################################################

  ######################## NIC statistics for port 1  ########################
  RX-packets: 9136800    RX-missed: 0          RX-bytes:  584755200
  RX-errors: 0
  RX-nombuf:  0         
  TX-packets: 0          TX-errors: 0          TX-bytes:  0

  Throughput (since last show)
  Rx-pps:      5880277          Rx-bps:   3010701944
  Tx-pps:            0          Tx-bps:            0
  ############################################################################
testpmd>";

fn setup(ring: Ring, hugepages: bool) -> Setup {
    let window = Window { warm_up: Duration::from_millis(200), length: Duration::from_secs(1) };
    let sockets = ["/t/0/a.sock".into(), "/t/0/b.sock".into()];
    Setup { sockets, ring, frame_bytes: 64, cpu: 3, hugepages, window }
}

/// A shell that plays testpmd.
fn pretend(script: &str) -> Result<Testpmd, BenchError> {
    let mut command = process::command("sh", None);
    Testpmd::spawn(command.args(["-c", script]))
}

#[test]
fn counters_are_read_for_each_port() {
    let port = |n| counters_of(STATS, n);
    assert_eq!(port(0), Some(Counters { sent: 9_136_992, received: 0, received_per_s: 0 }));
    assert_eq!(port(1), Some(Counters { sent: 0, received: 9_136_800, received_per_s: 5_880_277 }));
    assert_eq!(port(2), None);
    assert_eq!(counters_of(&STATS[..STATS.len() / 4], 0), None, "half an answer is none");
}

#[test]
fn the_command_line_says_ring_memory_and_addresses() {
    assert_eq!(
        arguments(&setup(Ring::Packed, true)).join(" "),
        "--lcores=0@3,1@3 --main-lcore=0 --no-pci --file-prefix=millrace-front --in-memory \
         -m 64 --single-file-segments \
         --vdev=net_virtio_user0,path=/t/0/a.sock,mac=02:00:00:00:00:0a,queue_size=256,mrg_rxbuf=0,\
         packed_vq=1,in_order=0 \
         --vdev=net_virtio_user1,path=/t/0/b.sock,mac=02:00:00:00:00:0b,queue_size=256,mrg_rxbuf=0,\
         packed_vq=1,in_order=0 \
         -- -i --nb-cores=1 --no-mlockall --no-flush-rx --total-num-mbufs=4096 --burst=32 \
         --txpkts=64 --tx-ip=10.99.0.10,10.99.0.11 --eth-peer=0,02:00:00:00:00:0b"
    );
    let line = arguments(&setup(Ring::InOrder, false)).join(" ");
    assert!(line.contains("packed_vq=0,in_order=1") && line.contains("--no-huge -m 512"), "{line}");
    assert!(arguments(&setup(Ring::Split, true)).join(" ").contains("packed_vq=0,in_order=0"));
}

#[test]
fn a_few_lost_frames_are_told_and_many_are_an_error() {
    let ports = |sent, received| {
        let none = Counters { sent: 0, received: 0, received_per_s: 0 };
        [Counters { sent, ..none }, Counters { received, ..none }]
    };
    // What was lost before it opened does not count.
    let opened = ports(96, 32);
    assert_eq!(lost(&opened, &ports(1096, 1032)).unwrap(), 0);
    assert_eq!(lost(&opened, &ports(1096, 984)).unwrap(), 48);
    let e = lost(&opened, &ports(1096, 983)).unwrap_err().to_string();
    assert_eq!(e, "keep frames circulating: 49 of 192 frames were lost; at most 48 may be");
    assert_eq!(between(&opened, &ports(128, 64)), (32, 32));
}

#[test]
fn an_answer_ends_at_the_prompt() {
    let mut t =
        pretend("printf 'hello -> testpmd> '; read x; printf \"got $x\ntestpmd> \"; read y")
            .unwrap();
    assert_eq!(t.ask("stop").unwrap(), " got stop\ntestpmd>");
}

#[test]
fn refusals_and_an_early_end_are_told() {
    let mut t =
        pretend("printf 'testpmd> '; read x; printf 'Bad arguments\ntestpmd> '; read y").unwrap();
    let e = t.ask("set fwd oi").unwrap_err().to_string();
    assert!(e.starts_with("testpmd refuses \"set fwd oi\": Bad arguments"), "{e}");
    let e = pretend("echo no huge pages; exit 1").err().unwrap().to_string();
    assert_eq!(e, "testpmd ended at \"its start\": no huge pages");
}
