//! Units and sidecores on several NUMA nodes.

use super::*;

impl Host {
    /// Sidecores on these nodes, units with memory on those; the far ones ask for a third more.
    fn on_nodes(mut self, cores: &[Node], units: &[Option<Node>]) -> Self {
        self.nodes = cores.to_vec();
        self.far_cost = 1.3;
        self.units.iter_mut().zip(units.iter().cycle()).for_each(|(u, node)| u.node = *node);
        self
    }

    /// Remote units, and sidecores of their node with room for them.
    fn could_go_home(&self) -> Vec<(UnitLoad, usize)> {
        let (cores, units) = self.measured();
        let homes = |unit: UnitLoad| {
            let good = |core: usize| {
                let CoreLoad { load, node, .. } = cores[core];
                self.history.active()[core] && node == unit.node && load + unit.load <= ROOM
            };
            (0..self.count)
                .filter(move |&core| good(core))
                .map(|core| (unit, core))
                .collect::<Vec<_>>()
        };
        let remote = units.into_iter().filter(|u| self.is_remote(u) && u.load >= 0.0005);
        remote.flat_map(homes).collect()
    }

    fn remote(&self) -> usize {
        self.units.iter().filter(|u| self.is_remote(u)).count()
    }
}

fn reasons(host: &Host) -> Vec<Reason> {
    host.moves.iter().map(|m| m.reason).collect()
}

#[test]
fn remote_units_go_home_and_stay() {
    // Each begins on the wrong one. With little load there is room, with more they change places.
    for load in [0.05, 0.1, 0.2] {
        let nodes = [Some(1), Some(0)];
        let mut host = Host::new(2, Limits::new(2, 2), &[load; 8]).on_nodes(&[0, 1], &nodes);
        assert_eq!(host.remote(), 8);
        host.looks(2);
        assert!(host.moves.is_empty(), "it must hold for a while");
        host.looks(100);
        assert_eq!((host.remote(), host.moves.len()), (0, 8));
        assert!(reasons(&host).iter().all(|r| *r == Reason::Node));
    }
}

#[test]
fn a_full_home_is_worse_than_a_far_sidecore_with_room() {
    // All memory is on node 0, and asks for more than its one sidecore should do.
    let mut host = Host::new(2, Limits::new(2, 2), &[0.15; 8]).on_nodes(&[0, 1], &[Some(0)]);
    host.units.iter_mut().for_each(|u| u.core = 0);
    host.looks(300);
    assert!(host.busiest() < 0.85, "{:?}", host.loads());
    assert!(host.remote() > 0 && host.could_go_home().is_empty());
    let moves = host.moves.len();
    host.looks(500);
    assert_eq!(host.moves.len(), moves, "to and fro");
}

#[test]
fn saturation_looks_on_its_own_node_first() {
    // Number 1 is far and idle, number 2 near with half of it used.
    let mut host = Host::new(3, Limits::new(3, 3), &[0.15; 6]).on_nodes(&[0, 1, 0], &[Some(0)]);
    host.units.iter_mut().for_each(|u| u.core = 0);
    host.units.push(UnitLoad { id: 9, core: 2, load: 0.3, movable: true, node: Some(0) });
    host.looks(100);
    assert!(host.busiest() < 0.85 && host.remote() == 0, "{:?}", host.loads());
}

#[test]
fn a_sidecore_is_activated_where_the_load_has_its_memory() {
    let nodes = [Some(1)];
    let mut host = Host::new(4, Limits::new(1, 4), &[0.15; 8]).on_nodes(&[0, 0, 1, 1], &nodes);
    host.looks(50);
    assert!(host.history.active()[2], "{:?}", host.history.active());
    host.looks(300);
    // It is filled up; one more is not activated before the other is saturated.
    assert_eq!((host.active(), host.remote()), (2, 4), "{:?}", host.loads());
}

#[test]
fn evenness_makes_no_unit_remote() {
    let mut host = Host::new(2, Limits::new(2, 2), &[0.1; 7]).on_nodes(&[0, 1], &[Some(0)]);
    host.units.iter_mut().for_each(|u| u.core = 0);
    host.looks(100);
    assert!(host.moves.is_empty(), "{:?}", host.moves);
    // Two of unknown memory do the same for evenness.
    host.units[0].node = None;
    host.units[1].node = None;
    host.looks(100);
    assert_eq!(reasons(&host), [Reason::Even; 2]);
}

#[test]
fn parking_keeps_units_at_home_where_it_can() {
    // Two sidecores of each node, a little load on each.
    let nodes = [Some(0), Some(0), Some(1), Some(1)];
    let mut host = Host::new(4, Limits::new(4, 4), &[0.2; 4]).on_nodes(&[0, 0, 1, 1], &nodes);
    host.limits.min_active = 2;
    host.looks(200);
    assert_eq!((host.active(), host.remote()), (2, 0), "{:?}", host.loads());
}

#[test]
fn what_leaves_a_parked_sidecore_goes_home() {
    let mut host = Host::new(3, Limits::new(2, 3), &[0.3, 0.1]).on_nodes(&[0, 1, 0], &[Some(0)]);
    host.units[1].core = 2;
    let moves = host.look().moves;
    assert_eq!(moves, [Move { unit: 1, from: 2, to: 0, reason: Reason::Parked }]);
}

fn memory() -> impl Strategy<Value = Option<Node>> {
    prop_oneof![Just(None), (0..3u32).prop_map(Some)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any steady load comes to rest, and then nobody is remote who has room at home.
    #[test]
    fn steady_loads_come_home_and_rest(
        loads in prop::collection::vec((0.0..0.5f64, memory()), 0..40),
        nodes in prop::collection::vec(0..3u32, 1..8),
        min in 1usize..8,
    ) {
        let count = nodes.len();
        let (loads, units): (Vec<f64>, Vec<_>) = loads.into_iter().unzip();
        let mut host =
            Host::new(count, Limits::new(min.min(count), count), &loads).on_nodes(&nodes, &units);
        host.looks(1000);
        let moves = host.moves.len();
        host.looks(200);
        prop_assert_eq!(host.moves.len(), moves, "{:?}", &host.moves[moves..]);
        prop_assert_eq!(host.could_go_home(), []);
        let asked: f64 = loads.iter().sum();
        if asked < 0.25 * count as f64 {
            prop_assert!(host.busiest() < 0.85, "{:?}", host.loads());
        }
    }

    /// One node decides as no node does.
    #[test]
    fn one_node_changes_nothing(
        loads in prop::collection::vec(prop::collection::vec(0.0..1.0f64, 12), 1..60),
        count in 1usize..6,
    ) {
        let mut none = Host::new(count, Limits::new(1, count), &loads[0]);
        let mut one = Host::new(count, Limits::new(1, count), &loads[0])
            .on_nodes(&[0; 6][..count], &[Some(0)]);
        for loads in loads.iter().cycle().take(200) {
            for host in [&mut none, &mut one] {
                host.units.iter_mut().zip(loads).for_each(|(u, &load)| u.load = load);
            }
            prop_assert_eq!(none.look(), one.look());
        }
    }
}
