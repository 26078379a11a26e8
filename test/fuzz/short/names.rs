// Read by the program and by its tests, each with a macro of its own.
targets! {
    agent_program
    agent_stream
    control_body
    control_config
    disk_request
    holder_packet
    mailbox
    module_copy
    module_frames
    module_ring
    net_flow
    net_frame
    net_header
    pipe_message
    qcow2_image
    qmp_line
    relay_session
    ring
    saved_session
    table_log
    table_request
    vhost_user
    vsock_packet
}
