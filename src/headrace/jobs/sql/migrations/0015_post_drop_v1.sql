-- What code before claims for many slots called; nothing calls it any more.

DROP FUNCTION headrace.add_groups_v1(
    integer[], integer[], smallint[], timestamptz[], double precision[], text[], text[], bytea[], text);
DROP FUNCTION headrace.cancel_v1(bigint);
DROP FUNCTION headrace.retry_ended_v1(bigint);
DROP FUNCTION headrace.claim_lanes_v1(bigint, integer, integer, integer, integer);
DROP FUNCTION headrace.claim_ready_v1(
    bigint, integer, integer, smallint[], timestamptz[], bigint[]);
DROP FUNCTION headrace.enqueue_v1(
    integer[], smallint[], timestamptz[], double precision[], text[], text[], bigint[], bytea[], text,
    boolean);
DROP FUNCTION headrace.finish_members_v1(bigint[], text[]);
DROP FUNCTION headrace.fold_lanes_v1(integer, integer);
DROP FUNCTION headrace.grant_v1(text, integer, text[], text[], timestamptz);
DROP FUNCTION headrace.keep_failed_v1(bigint, integer[], text[], text[], text[]);
DROP FUNCTION headrace.put_back_v1(bigint, integer[], text[], double precision[]);
DROP FUNCTION headrace.return_lease_v1(bigint, integer);
DROP FUNCTION headrace.set_lane_v1(
    text, text, integer, double precision, integer, boolean, integer);
DROP FUNCTION headrace.settle_lanes_v1(text, integer, timestamptz, text[], text[]);
DROP FUNCTION headrace.settle_v1(
    bigint, bigint[], text[], double precision[], text[], text[]);
