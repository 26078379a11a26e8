//! Requests to the kernel's routing (rtnetlink), one at a time, each answered before the next.

use std::io;
use std::net::{IpAddr, Ipv6Addr};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric,
    RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// Room for an answer: an error carries the request, and ours are short.
const ANSWER_BYTES: usize = 4096;

/// A socket to the network namespace in which it was opened, from wherever it is used.
#[derive(Debug)]
pub(crate) struct Netlink(Socket);

/// A default route.
pub(crate) struct DefaultRoute {
    /// The table it goes into.
    pub table: u8,
    /// The interface.
    pub link: u32,
    /// The next host, on the link. It need not exist.
    pub gateway: IpAddr,
    /// Congestion window of new connections, in segments; none: the kernel's.
    pub first_cwnd: Option<u32>,
}

/// Routing table of local addresses (`RT_TABLE_LOCAL`).
const LOCAL_TABLE: u8 = 255;

/// The main table.
pub(crate) const MAIN_TABLE: u8 = RouteHeader::RT_TABLE_MAIN;

impl Netlink {
    /// Opens a socket in the calling thread's namespace.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self(socket))
    }

    /// Brings an interface up.
    pub fn set_up(&self, link: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = link;
        message.header.flags = LinkFlags::Up;
        message.header.change_mask = LinkFlags::Up;
        self.ask(RouteNetlinkMessage::SetLink(message), 0)
    }

    /// Gives an interface its hardware address, MTU and queue.
    pub fn set_link(
        &self,
        link: u32,
        address: [u8; 6],
        mtu: u16,
        queue_frames: u32,
    ) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = link;
        message.attributes = vec![
            LinkAttribute::Address(address.to_vec()),
            LinkAttribute::Mtu(mtu.into()),
            LinkAttribute::TxQueueLen(queue_frames),
        ];
        self.ask(RouteNetlinkMessage::SetLink(message), 0)
    }

    /// Gives an interface an address, without a network around it. It takes packets for it on
    /// return.
    pub fn add_address(&self, link: u32, address: IpAddr) -> io::Result<()> {
        if let IpAddr::V6(v6) = address {
            // The kernel lets an IPv6 address send at once, and takes packets for it once one of
            // its work queues has run: on a busy host the first acknowledgements would be lost.
            allow_existing(self.add_local_route(link, v6))?;
        }
        let mut message = AddressMessage::default();
        message.header.index = link;
        message.header.family = family(address);
        message.header.prefix_len = if address.is_ipv4() { 32 } else { 128 };
        message.header.scope = AddressScope::Universe;
        message.attributes =
            vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
        if address.is_ipv6() {
            message.header.flags = AddressHeaderFlags::Nodad;
            message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        allow_existing(
            self.ask(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL),
        )
    }

    fn add_local_route(&self, link: u32, address: Ipv6Addr) -> io::Result<()> {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet6;
        message.header.destination_prefix_length = 128;
        message.header.table = LOCAL_TABLE;
        message.header.protocol = RouteProtocol::Static;
        message.header.scope = RouteScope::Host;
        message.header.kind = RouteType::Local;
        message.attributes = vec![
            RouteAttribute::Oif(link),
            RouteAttribute::Destination(RouteAddress::Inet6(address)),
        ];
        self.ask(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Adds a default route.
    pub fn add_default_route(&self, route: &DefaultRoute) -> io::Result<()> {
        let mut message = RouteMessage::default();
        message.header.address_family = family(route.gateway);
        message.header.table = route.table;
        message.header.protocol = RouteProtocol::Static;
        message.header.scope = RouteScope::Universe;
        message.header.kind = RouteType::Unicast;
        message.header.flags = RouteFlags::Onlink;
        message.attributes = vec![
            RouteAttribute::Oif(route.link),
            RouteAttribute::Gateway(RouteAddress::from(route.gateway)),
        ];
        if let Some(cwnd) = route.first_cwnd {
            message.attributes.push(RouteAttribute::Metrics(vec![RouteMetric::InitCwnd(cwnd)]));
        }
        self.ask(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Adds a rule: packets with this mark go by this table.
    pub fn add_mark_rule(&self, like: IpAddr, mark: u32, table: u8) -> io::Result<()> {
        let mut message = RuleMessage::default();
        message.header.family = family(like);
        message.header.action = RuleAction::ToTable;
        message.header.table = table;
        message.attributes = vec![RuleAttribute::FwMark(mark), RuleAttribute::Priority(mark)];
        self.ask(RouteNetlinkMessage::NewRule(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    fn ask(&self, request: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.0.send(&bytes, 0)?;
        let mut answer = Vec::with_capacity(ANSWER_BYTES);
        self.0.recv(&mut answer, 0)?;
        let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer)
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        match answer.payload {
            NetlinkPayload::Error(error) if error.code.is_none() => Ok(()),
            NetlinkPayload::Error(error) => Err(error.to_io()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Takes an error that the thing exists already as success.
fn allow_existing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}
