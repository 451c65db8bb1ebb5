-- What code before claims for many slots called; nothing calls it any more.

DROP FUNCTION penstock.add_groups_v1(
    integer[], integer[], smallint[], timestamptz[], double precision[], text[], text[], bytea[], text);
DROP FUNCTION penstock.cancel_v1(bigint);
DROP FUNCTION penstock.retry_ended_v1(bigint);
DROP FUNCTION penstock.claim_lanes_v1(bigint, integer, integer, integer, integer);
DROP FUNCTION penstock.claim_ready_v1(
    bigint, integer, integer, smallint[], timestamptz[], bigint[]);
DROP FUNCTION penstock.enqueue_v1(
    integer[], smallint[], timestamptz[], double precision[], text[], text[], bigint[], bytea[], text,
    boolean);
DROP FUNCTION penstock.finish_members_v1(bigint[], text[]);
DROP FUNCTION penstock.fold_lanes_v1(integer, integer);
DROP FUNCTION penstock.grant_v1(text, integer, text[], text[], timestamptz);
DROP FUNCTION penstock.keep_failed_v1(bigint, integer[], text[], text[], text[]);
DROP FUNCTION penstock.put_back_v1(bigint, integer[], text[], double precision[]);
DROP FUNCTION penstock.return_lease_v1(bigint, integer);
DROP FUNCTION penstock.set_lane_v1(
    text, text, integer, double precision, integer, boolean, integer);
DROP FUNCTION penstock.settle_lanes_v1(text, integer, timestamptz, text[], text[]);
DROP FUNCTION penstock.settle_v1(
    bigint, bigint[], text[], double precision[], text[], text[]);
