// Written by `make reference` from the OpenAPI description; do not edit.

export interface Options {
  /** Address of the API, such as http://127.0.0.1:8080. */
  baseUrl: string;
  /** A token, or a function that returns one, such as after its renewal. */
  token?: string | (() => string | Promise<string>);
  /** Another fetch than the global one. */
  fetch?: typeof globalThis.fetch;
}

/** An answer with a status from 400: application/problem+json (RFC 9457). */
export declare class Problem extends Error {
  readonly status: number;
  /** Code of the error, such as jobs.queue_unknown; see the page of errors. */
  readonly code: string;
  readonly body: ProblemDocument | string;
  /** Seconds after which the request may be repeated, if the server names them. */
  readonly retryAfterS: number | undefined;
}

export interface RequestOptions {
  signal?: AbortSignal;
  headers?: Record<string, string>;
}


export declare class Headrace {
  constructor(options: Options);

  /** Record outcomes of jobs of a lease. Safe to repeat until the lease has no other jobs. Another outcome for a settled job is refused. */
  ackLease(parameters: { lease_id: string | number; body: Acked }, options?: RequestOptions): Promise<void>;

  /** Add a cron. Its first job comes at its next scheduled time. */
  addCron(parameters: { body: NewCron }, options?: RequestOptions): Promise<Cron>;

  /** Add a disk while the node runs. The node keeps it for its next starts. */
  addMediaDisk(parameters: { body: DiskToAdd }, options?: RequestOptions): Promise<Disk>;

  /** Add one post or up to 1,000, all or none; once answered, all followers' feeds have them. An existing post stays unchanged, so a call may be repeated. `at` may be in the past (imports), or in the future: then the post becomes visible at that moment. */
  addPosts(parameters: { body: NewPost | Array<NewPost> }, options?: RequestOptions): Promise<Array<Post>>;

  /** Append the body at `Upload-Offset`. The answer's `Upload-Offset` is durable. The last byte stores the object: its answer takes as long as one copy of all bytes. The content type is `application/offset+octet-stream`. */
  appendToMediaUpload(parameters: { upload: string | number }, options?: RequestOptions): Promise<null>;

  /** Block authors: neither side sees the posts of the other. */
  block(parameters: { viewer: string | number; author: string | number }, options?: RequestOptions): Promise<Changed>;

  /** Block authors: neither side sees the posts of the other. */
  blockMany(parameters: { viewer: string | number; body: Array<number | string> }, options?: RequestOptions): Promise<Changed>;

  /** Fetch the file of the customer's source now, in addition to its schedule. */
  bringFetchSource(parameters: { customer: string | number }, options?: RequestOptions): Promise<BringAnswer>;

  /** Apply one bounded step of an action to matching jobs, newest first. */
  bulkJobs(parameters: { body: BulkRequest }, options?: RequestOptions): Promise<BulkResponse>;

  /** Cancel a waiting job, with `running=true` request the end of a running one. With `keep=false` delete a waiting or ended one. */
  cancelJob(parameters: { job_id: string | number; keep?: boolean; running?: boolean }, options?: RequestOptions): Promise<void>;

  /** Cancel a workflow and all jobs that it started. */
  cancelWorkflow(parameters: { workflow_id: string | number }, options?: RequestOptions): Promise<WorkflowCancelled>;

  /** Apply a run that was held because its file looks truncated or wrong. */
  confirmFetchRun(parameters: { run: string | number }, options?: RequestOptions): Promise<Run>;

  /** Number of posts newer than the read marker, counted to 100; all posts without a marker. */
  countUnread(parameters: { viewer: string | number; kinds?: string | null }, options?: RequestOptions): Promise<Unread>;

  /** Return a new link to the page of a seller; anyone with the link can read it. The link begins with `fetch.seller_url`, or else with the address of this request. */
  createFetchSellerLink(parameters: { customer: string | number; body: SellerLinkLife }, options?: RequestOptions): Promise<SellerLink>;

  /** Begin a resumable upload of `Upload-Length` bytes, by tus 1.0; its URL is the Location. `Upload-Metadata` has the object's `key`, and optionally the `sha256` of its bytes, each in base64: `key dHJhY2tzL2EubXAz`. */
  createMediaUpload(options?: RequestOptions): Promise<null>;

  /** Delete totals and series of an item, and drop its hits for 30 days. */
  deleteItem(parameters: { id: string | number }, options?: RequestOptions): Promise<Deleted>;

  /** Remove a tag. URLs with this tag get 404. */
  deleteMediaTag(parameters: { tag: string | number }, options?: RequestOptions): Promise<void>;

  /** Delete a post: pages omit it at once, and handlers of deletions run. Safe to repeat. */
  deletePost(parameters: { id: string | number }, options?: RequestOptions): Promise<void>;

  /** Discard a held run; nothing of it is applied. */
  discardFetchRun(parameters: { run: string | number }, options?: RequestOptions): Promise<Run>;

  /** Start no more jobs on a host; running jobs finish. */
  drainHost(parameters: { host: string | number }, options?: RequestOptions): Promise<void>;

  /** Cache nothing more on the disk of this id. What it has is still served. Idempotent. */
  drainMediaDisk(parameters: { disk: string | number }, options?: RequestOptions): Promise<Disk>;

  /** Let other nodes serve the node's keys; it still answers requests. Idempotent. */
  drainMediaNode(parameters: { node: string | number }, options?: RequestOptions): Promise<NodeInfo>;

  /** Change payload, priority or due time of a waiting job. */
  editJob(parameters: { job_id: string | number; body: JobEdited }, options?: RequestOptions): Promise<void>;

  /** Enqueue one job or a list of up to 10,000, all or none. */
  enqueueJobs(parameters: { queue: string | number; body: JobToAdd | Array<JobToAdd> }, options?: RequestOptions): Promise<JobsAdded>;

  /** Series of the `limit` items after id `after`; `format` is json, csv or parquet. The field `after` (csv and parquet: the header `x-headrace-after`) continues; without it the page is the last one. */
  exportSeries(parameters?: { by?: "hour" | "day" | "month"; from?: string | null; to?: string | null; after?: string; limit?: number; format?: "json" | "csv" | "parquet" }, options?: RequestOptions): Promise<ExportPage>;

  /** Extend a lease to `lease` from now. */
  extendLease(parameters: { lease_id: string | number; lease?: string }, options?: RequestOptions): Promise<Extended>;

  /** Follow an author: the next page includes the author's posts, also earlier ones. */
  follow(parameters: { viewer: string | number; author: string | number }, options?: RequestOptions): Promise<Changed>;

  /** Follow up to 10,000 authors, all or none. */
  followMany(parameters: { viewer: string | number; body: Array<number | string> }, options?: RequestOptions): Promise<Changed>;

  /** Remove a lost host that will not return from the fleet; its alert ends. */
  forgetHost(parameters: { host: string | number }, options?: RequestOptions): Promise<void>;

  /** Show base backups, the time up to which each is restorable, and the lag of the archive. 422 without `backup.url`, or with `postgres.url`, whose backups are made by another tool. */
  getBackups(options?: RequestOptions): Promise<BackupsState>;

  /** Changes after position `after`; `format` is json, csv or parquet. Store the new `position` (csv and parquet: the header `x-headrace-after`) with the rows, and pass it as `after`. An empty page means that all were read. `after=now` returns the current position. */
  getChanges(parameters?: { after?: string; limit?: number; format?: "json" | "csv" | "parquet" }, options?: RequestOptions): Promise<ChangePage>;

  /** Show a cron with its next scheduled time and its last job. */
  getCron(parameters: { name: string | number }, options?: RequestOptions): Promise<Cron>;

  /** The newest posts of followed authors, without muted and blocked ones. `next_cursor` or the Link header leads to the next page; no post is repeated or omitted, even if posts are added or deleted meanwhile. `since=` (the `newest` of an earlier page) selects newer posts only, `kinds=photo,video` posts of these kinds. `rank=` names an order defined by the application. An unknown viewer has an empty feed. */
  getFeedPage(parameters: { viewer: string | number; limit?: number; cursor?: string | null; since?: string | null; kinds?: string | null; rank?: string | null }, options?: RequestOptions): Promise<Page>;

  /** A stored post, also before its scheduled time. */
  getFeedPost(parameters: { id: string | number }, options?: RequestOptions): Promise<Post>;

  /** State, oldest and newest post of each shard. */
  getFeedStats(options?: RequestOptions): Promise<Array<ShardState>>;

  /** Whether the viewer's pages show the post, and all reasons: follow, mute, block, time. */
  getFeedWhy(parameters: { viewer: string | number; post: string }, options?: RequestOptions): Promise<PostWhy>;

  /** Show a customer's limits. */
  getFetchCustomer(parameters: { customer: string | number }, options?: RequestOptions): Promise<Customer>;

  /** One host, per customer. */
  getFetchHost(parameters: { host: string | number }, options?: RequestOptions): Promise<HostsAnswer>;

  /** Current state of an item with the outcome of each photo. The id is a percent-encoded query parameter: ids may contain `/`, which proxies change in paths. */
  getFetchItem(parameters: { customer: string | number; id: string }, options?: RequestOptions): Promise<StoredItem>;

  /** The mapping of a file's column names. */
  getFetchMapping(parameters: { name: string | number }, options?: RequestOptions): Promise<NamedMapping>;

  /** Counts of rows, items and photos by outcome. */
  getFetchRun(parameters: { run: string | number }, options?: RequestOptions): Promise<Run>;

  /** Counts and problems of a run for people: one HTML page without scripts or links. */
  getFetchRunReport(parameters: { run: string | number; lang?: string | null }, options?: RequestOptions): Promise<Response>;

  /** The fields that rows of a category must have. */
  getFetchSchema(parameters: { category: string | number }, options?: RequestOptions): Promise<CategorySchema>;

  /** The page of a seller: last catalogues, their problems, an example of a correct row. The link is the only authorization. `lang` or Accept-Language selects the language. Browsers receive errors as pages. */
  getFetchSellerPage(parameters: { token: string | number; run?: number | null; lang?: string | null }, options?: RequestOptions): Promise<Response>;

  /** The source of the customer's catalogue, with its next run and last result. */
  getFetchSource(parameters: { customer: string | number }, options?: RequestOptions): Promise<Source>;

  /** Download times of all hosts, errors per class and week, and timeout classes that would fit. With `format=csv` the response has the counts: week, class, outcome, download time up to, attempts. */
  getFetchStudy(parameters?: { weeks?: number; format?: "json" | "csv" }, options?: RequestOptions): Promise<Study>;

  /** URL, progress and last error of a webhook. */
  getFetchWebhook(parameters: { customer: string | number }, options?: RequestOptions): Promise<Webhook>;

  /** Whether the URL is allowed, its last outcome per customer, and its next request. */
  getFetchWhy(parameters: { url: string }, options?: RequestOptions): Promise<UrlReport>;

  /** Show hosts with their slots, the plan, the newest decisions and open alerts. */
  getFleet(options?: RequestOptions): Promise<FleetState>;

  /** Show counts of the busiest queues in up to 800 steps; all others are the queue ''. */
  getFleetHistory(parameters: { from: string; to: string; step_s?: number; queues?: number }, options?: RequestOptions): Promise<Array<QueueStep>>;

  /** Show counts of each queue in the last five minutes, and of all per minute of an hour. */
  getFleetLoad(options?: RequestOptions): Promise<FleetLoad>;

  /** Report that the process is alive, without checking any engine. */
  getHealth(options?: RequestOptions): Promise<Health>;

  /** Show series, separated by commas, in the last hour or up to 30 days. `by` is `key`, `host` or `center`: a line per label value (percentiles for times), host or data center. Steps are 60 s up to 2 hours, 120 s up to 8 hours, 600 s up to 48 hours, then an hour. */
  getHistory(parameters: { series: string; from?: string | null; to?: string | null; by?: string }, options?: RequestOptions): Promise<HistoryAnswer>;

  /** Return the name, version and links of the API. */
  getIndex(options?: RequestOptions): Promise<Index>;

  /** Show a job in any state; `gone` if it ended and was not kept. */
  getJob(parameters: { job_id: string | number }, options?: RequestOptions): Promise<Job>;

  /** Show a lane's limits and current counts. */
  getLane(parameters: { limiter: string | number; lane: string | number }, options?: RequestOptions): Promise<Lane>;

  /** Show a limiter: the limits of its lanes without limits of their own. */
  getLimiter(parameters: { limiter: string | number }, options?: RequestOptions): Promise<Limiter>;

  /** Marks of an item that overlap a span, oldest first; by default the last 30 days. */
  getMarks(parameters: { id: string | number; from?: string | null; to?: string | null }, options?: RequestOptions): Promise<Array<views_model_Mark>>;

  /** One node of the cluster. */
  getMediaNode(parameters: { node: string | number }, options?: RequestOptions): Promise<NodeInfo>;

  /** Describe the object stored under `key`, and its URL. */
  getMediaObject(parameters: { key: string | number }, options?: RequestOptions): Promise<MediaObject>;

  /** The nodes that own `key`, in the order in which they are tried. It need not be stored. */
  getMediaOwners(parameters: { key: string | number }, options?: RequestOptions): Promise<Ownership>;

  /** The contents of a stored tag. */
  getMediaTag(parameters: { tag: string | number }, options?: RequestOptions): Promise<StoredTag>;

  /** The offset of an upload, in `Upload-Offset`; use HEAD. */
  getMediaUpload(parameters: { upload: string | number }, options?: RequestOptions): Promise<null>;

  /** Return the Prometheus series of all roles on this machine. */
  getMetrics(options?: RequestOptions): Promise<Response>;

  /** Return the OpenAPI 3.1 description of this API. */
  getOpenApi(options?: RequestOptions): Promise<Record<string, unknown>>;

  /** Count a view of an item and return an uncacheable image of one pixel. HEAD does not count. */
  getPixel(parameters: { id: string | number; viewer?: string | null; event?: string | null; class?: Traffic | null }, options?: RequestOptions): Promise<Response>;

  /** Return the meaning of an error code; the `type` of each problem document links here. */
  getProblem(parameters: { code: string | number }, options?: RequestOptions): Promise<ErrorKind>;

  /** Show a queue with its backlog. */
  getQueue(parameters: { queue: string | number }, options?: RequestOptions): Promise<QueueStatus>;

  /** The read marker of a viewer; all null: no marker. */
  getReadMarker(parameters: { viewer: string | number }, options?: RequestOptions): Promise<Marker>;

  /** Check every engine for up to 2 s; 503 names one that is down, or a role that keeps dying. `reads` names the server of series, top lists and lists: the replica with its lag, or the primary and the reason; empty without `postgres.replica_url`. `warnings` with 200: commits wait for a synchronous standby, so writes of every API process wait, and reads are answered. */
  getReadiness(options?: RequestOptions): Promise<Readiness>;

  /** Views of an item by hour, day or month from `from` to before `to`, oldest first. Times without views are omitted. Days begin at midnight in the deployment's time zone. By default `to` is now, and `from` is 2 days before (hours), the beginning of the day 30 days before (days) or of the month 11 months before. Old hours exist as days only. */
  getSeries(parameters: { id: string | number; by?: "hour" | "day" | "month"; from?: string | null; to?: string | null }, options?: RequestOptions): Promise<Array<SeriesPoint>>;

  /** The items with the most views of a class within `window` (`24h`, `7d`), most first. */
  getTop(parameters?: { window?: string; limit?: number; class?: Traffic }, options?: RequestOptions): Promise<Array<TopEntry>>;

  /** Read the totals of up to 1,000 items in order: `ids=a,b,c` or `ids=a&ids=b`. `fields` selects from `total,today,unique,classes,counters`. If-None-Match with the ETag of an unchanged answer returns 304. `total` is null while it is unavailable. `stale` means that the most recent hits may be missing. */
  getTotals(parameters: { ids: Array<string>; fields?: string }, options?: RequestOptions): Promise<Array<Total>>;

  /** Estimated different viewers of items together: `ids=a,b,c`, by day, week, month or `all`. A viewer of several items or days counts once per period. The default span is today and the 30 days before it; items times days are at most 3,660. */
  getViewers(parameters: { ids: Array<string>; by?: "day" | "week" | "month" | "all"; from?: string | null; to?: string | null }, options?: RequestOptions): Promise<Array<DayViewers>>;

  /** Entries of each shard that are counted in Valkey and not yet in PostgreSQL. */
  getViewsLag(options?: RequestOptions): Promise<Array<ShardLag>>;

  /** Show a workflow with its steps. */
  getWorkflow(parameters: { workflow_id: string | number }, options?: RequestOptions): Promise<WorkflowRun>;

  /** Count one view of an item, or `n` views, and return its total. `counters=photo,phone` adds 1 to each of these; with `n=0` to them alone. */
  hitItem(parameters: { id: string | number; n?: number; viewer?: string | null; event?: string | null; class?: Traffic | null; counters?: string | null }, options?: RequestOptions): Promise<Total>;

  /** Count up to 1,000 hits, each an id or an object, and return the totals in their order. The hits of one shard are counted together. If a shard is unreachable the call fails, and hits of other shards stay counted. Use an `event` in hits of a call that may be repeated. */
  hitItems(parameters: { body: Array<NewHit | string> }, options?: RequestOptions): Promise<Array<Total>>;

  /** List the newest 100 alerts; with `open` only open ones. */
  listAlerts(parameters?: { open?: boolean }, options?: RequestOptions): Promise<Array<Alert>>;

  /** List actions of the console, newest first; pass the last id as `before` for the next page. */
  listAudit(parameters?: { before?: number | null; limit?: number }, options?: RequestOptions): Promise<Array<AuditLine>>;

  /** The posts of one author, newest first, independent of the viewer; `kinds=` filters. */
  listAuthorPosts(parameters: { author: string | number; limit?: number; cursor?: string | null; kinds?: string | null }, options?: RequestOptions): Promise<Page>;

  /** List the blocks */
  listBlocks(parameters: { viewer: string | number; limit?: number; cursor?: string | null }, options?: RequestOptions): Promise<People>;

  /** List every cron, by name. */
  listCrons(options?: RequestOptions): Promise<Array<Cron>>;

  /** List changes of slots with reasons, newest first; the next page is `before` the last id. */
  listDecisions(parameters?: { before?: number | null; limit?: number }, options?: RequestOptions): Promise<Array<Decision>>;

  /** Every `on_item` handler that a worker has started with, with its number of delivered items. */
  listFetchConsumers(options?: RequestOptions): Promise<ConsumersAnswer>;

  /** Every customer with its limits. */
  listFetchCustomers(options?: RequestOptions): Promise<CustomersAnswer>;

  /** Pairs of photos that look alike: `distance` of their hashes' 64 bits differ, at most 7. `across`: only pairs of two customers (true) or of one (false). `reviewed`: the pairs that a moderator has marked, instead of the others. */
  listFetchDuplicates(parameters?: { customer?: string | null; across?: boolean | null; reviewed?: boolean; cursor?: number | null; limit?: number }, options?: RequestOptions): Promise<DuplicatesAnswer>;

  /** Speed, timeout class, requests and outcomes per host and customer. */
  listFetchHosts(parameters?: { customer?: string | null; after_host?: string; after_customer?: string; limit?: number }, options?: RequestOptions): Promise<HostsAnswer>;

  /** Mappings of column names, by the mapping's name. */
  listFetchMappings(options?: RequestOptions): Promise<MappingsAnswer>;

  /** Items to publish, edit and unpublish; continue with `next_after` to miss none. */
  listFetchResults(parameters?: { after?: number; limit?: number; customer?: string | null }, options?: RequestOptions): Promise<ResultsAnswer>;

  /** New, changed and gone items by id; changed ones with the fields that differ. */
  listFetchRunChanges(parameters: { run: string | number; after?: string; limit?: number }, options?: RequestOptions): Promise<ChangesAnswer>;

  /** Problems of rows, and photos that failed or were refused. The first 1,000 problems of rows are kept, in row order. `problems` lists faults of rows, including links refused without a request; `photos` lists requested photos without a result. With `format=csv` or `Accept: text/csv` the response is one stream: row, line, item, field, code, text, link. `lang` or Accept-Language selects the language of `text`. */
  listFetchRunErrors(parameters: { run: string | number; after?: number; photos_after?: number; limit?: number; lang?: string | null; format?: "json" | "csv" | null }, options?: RequestOptions): Promise<ProblemsAnswer>;

  /** The newest runs, of one customer or of all. */
  listFetchRuns(parameters?: { customer?: string | null; limit?: number }, options?: RequestOptions): Promise<RunsAnswer>;

  /** Schemas by category; `default` applies to categories without one. */
  listFetchSchemas(options?: RequestOptions): Promise<SchemasAnswer>;

  /** Every source with its next run and last result. */
  listFetchSources(options?: RequestOptions): Promise<SourcesAnswer>;

  /** Webhooks by customer with backlog and failures; continue with `after` = the last customer. */
  listFetchWebhooks(parameters?: { after?: string; limit?: number }, options?: RequestOptions): Promise<WebhooksAnswer>;

  /** Followers of an author, latest first, with their total. */
  listFollowers(parameters: { author: string | number; limit?: number; cursor?: string | null }, options?: RequestOptions): Promise<People>;

  /** Followed authors, latest first, with their total; includes muted and blocked ones. */
  listFollowing(parameters: { viewer: string | number; limit?: number; cursor?: string | null }, options?: RequestOptions): Promise<People>;

  /** Items that a `before_publish` handler holds back, with the reasons. */
  listHeldFetchItems(parameters?: { customer?: string | null; after_customer?: string; after_item?: string; limit?: number }, options?: RequestOptions): Promise<HeldAnswer>;

  /** List starts of roles, changes of their versions, deaths and outages, oldest first. Without `from`, those of the last hour before `to` or now; the span has at most 30 days. `kind` is start, deploy, restart, deaths or outage; without it, all are listed. */
  listHistoryMarks(parameters?: { from?: string | null; to?: string | null; kind?: string }, options?: RequestOptions): Promise<Array<web_marks_Mark>>;

  /** The objects requested most from the node on the API's machine, in requests per second. The rates are sampled; the last minutes count most. */
  listHottestMedia(parameters?: { limit?: number }, options?: RequestOptions): Promise<Array<HotObject>>;

  /** List jobs by queue, state and lane, newest first; `q` searches the errors of ended jobs. `from` and `to` bound the time of the end; of unfinished jobs, when they are due. Continue with `next_cursor` even after a short page: expensive searches are cut off. */
  listJobs(parameters?: { queue?: string | null; state?: string | null; lane?: string | null; q?: string | null; from?: string | null; to?: string | null; cursor?: string | null; limit?: number }, options?: RequestOptions): Promise<JobsListed>;

  /** List lanes by name; the next page is `after` the last name. */
  listLanes(parameters: { limiter: string | number; after?: string; limit?: number }, options?: RequestOptions): Promise<Array<Lane>>;

  /** List every limiter with its limits and queues, by name. */
  listLimiters(options?: RequestOptions): Promise<Array<Limiter>>;

  /** All disks of the node on the API's machine, by path. */
  listMediaDisks(options?: RequestOptions): Promise<Array<Disk>>;

  /** All nodes, each probed now, with its weight for load balancers; 0: no new clients. */
  listMediaEntry(options?: RequestOptions): Promise<Array<EntryNode>>;

  /** The subfolders and objects directly in the folder `prefix`, by name, at most `limit`. The next page is behind the name `next_after`. */
  listMediaFolder(parameters?: { prefix?: string; after?: string; limit?: number }, options?: RequestOptions): Promise<MediaFolder>;

  /** All nodes of the cluster by name, with address, data center, weight, state and share. */
  listMediaNodes(options?: RequestOptions): Promise<Array<NodeInfo>>;

  /** The objects in the folder `prefix`, in no order, at most `limit`. */
  listMediaObjects(parameters?: { prefix?: string; limit?: number }, options?: RequestOptions): Promise<ObjectsAnswer>;

  /** The requests that all nodes log, and until when. */
  listMediaTraces(options?: RequestOptions): Promise<Array<Watch>>;

  /** List the mutes */
  listMutes(parameters: { viewer: string | number; limit?: number; cursor?: string | null }, options?: RequestOptions): Promise<People>;

  /** The newest results, for people; pollers need the order of commits of `/v1/fetch/results`. */
  listNewestFetchResults(parameters?: { cursor?: number | null; limit?: number; customer?: string | null; from?: string | null; to?: string | null }, options?: RequestOptions): Promise<NewestResultsAnswer>;

  /** List every error code of this server. */
  listProblems(options?: RequestOptions): Promise<Array<ErrorKind>>;

  /** Show counts and highest backlog of a queue per hour, in the last 7 days or up to 90. */
  listQueueHours(parameters: { queue: string | number; from?: string | null; to?: string | null }, options?: RequestOptions): Promise<Array<QueueHour>>;

  /** Show counts and backlog of a queue per minute, in the last hour or up to two days. */
  listQueueMinutes(parameters: { queue: string | number; from?: string | null; to?: string | null }, options?: RequestOptions): Promise<Array<QueueMinute>>;

  /** List every queue with its backlog. */
  listQueues(options?: RequestOptions): Promise<Array<QueueStatus>>;

  /** Mark a span of an item's time; by default it begins now and has no end. Safe to repeat. */
  markItem(parameters: { id: string | number; body: NewMark }, options?: RequestOptions): Promise<views_model_Mark>;

  /** Mute authors: the viewer does not see their posts; they are not notified. */
  mute(parameters: { viewer: string | number; author: string | number }, options?: RequestOptions): Promise<Changed>;

  /** Mute authors: the viewer does not see their posts; they are not notified. */
  muteMany(parameters: { viewer: string | number; body: Array<number | string> }, options?: RequestOptions): Promise<Changed>;

  /** Start no more jobs of a lane; running jobs continue, limits and weight stay. */
  pauseLane(parameters: { limiter: string | number; lane: string | number }, options?: RequestOptions): Promise<Lane>;

  /** Each node's share of all requests now and after a change. No changes are made. */
  planMedia(parameters: { body: media_http_cluster_Change }, options?: RequestOptions): Promise<Plan>;

  /** Purge `keys`, or all keys with `prefix`, from all caches within 2 seconds. Idempotent. */
  purgeMedia(parameters: { body: ToPurge }, options?: RequestOptions): Promise<Purged>;

  /** Store the body durably under `key`, replacing an existing object. At most 64 MiB. */
  putMediaObject(parameters: { key: string | number; body: Blob | ArrayBuffer | Uint8Array | ReadableStream<Uint8Array> | string }, options?: RequestOptions): Promise<MediaObject>;

  /** Store a tag that signed URLs put in front of tracks. Equal tags have equal ids. */
  putMediaTag(parameters: { body: TagToPut }, options?: RequestOptions): Promise<StoredTag>;

  /** Enqueue a rebuild of the index in Valkey. Pages are served meanwhile. */
  rebuildFeed(options?: RequestOptions): Promise<RebuildJob>;

  /** Enqueue the move of an item's views of whole hours to another class. Safe to repeat. */
  reclassifyViews(parameters: { body: Reclassify }, options?: RequestOptions): Promise<ReclassifyJob>;

  /** Publish a held item as it is. */
  releaseHeldFetchItem(parameters: { customer: string | number; id: string }, options?: RequestOptions): Promise<void>;

  /** Remove a cron that no running code declares. */
  removeCron(parameters: { name: string | number }, options?: RequestOptions): Promise<void>;

  /** Remove a consumer and its waiting deliveries; a worker with its handler adds it again. */
  removeFetchConsumer(parameters: { name: string | number }, options?: RequestOptions): Promise<void>;

  /** Delete a mapping; sources that use it then fail. */
  removeFetchMapping(parameters: { name: string | number }, options?: RequestOptions): Promise<void>;

  /** Delete a schema; the default one applies from the next run on. */
  removeFetchSchema(parameters: { category: string | number }, options?: RequestOptions): Promise<void>;

  /** Stop fetching the customer's file; its items stay as they are. */
  removeFetchSource(parameters: { customer: string | number }, options?: RequestOptions): Promise<void>;

  /** Delete the webhook. Results remain available by polling. */
  removeFetchWebhook(parameters: { customer: string | number }, options?: RequestOptions): Promise<void>;

  /** Remove a limiter, with its lanes, that has no queue, no job and no declaration by code. */
  removeLimiter(parameters: { limiter: string | number }, options?: RequestOptions): Promise<void>;

  /** Remove a node. A node that still runs registers again at its next start. */
  removeMediaNode(parameters: { node: string | number }, options?: RequestOptions): Promise<void>;

  /** Remove the object. Nodes drop it within a minute, or at once after a purge of `key`. */
  removeMediaObject(parameters: { key: string | number }, options?: RequestOptions): Promise<void>;

  /** Remove an upload and its bytes. The object of a finished one stays. */
  removeMediaUpload(parameters: { upload: string | number }, options?: RequestOptions): Promise<void>;

  /** Remove an empty queue that no code runs, such as one created by a typing error. */
  removeQueue(parameters: { queue: string | number }, options?: RequestOptions): Promise<void>;

  /** Deliver the newest version of every item again, of one customer or of all. */
  replayFetchConsumer(parameters: { name: string | number; customer?: string | null }, options?: RequestOptions): Promise<ReplayAnswer>;

  /** Resend every result after number `after`, in order. */
  replayFetchWebhook(parameters: { customer: string | number; after?: number }, options?: RequestOptions): Promise<WebhookReplay>;

  /** Remove a lane's own limits, pause and weight; it follows its limiter again. */
  resetLane(parameters: { limiter: string | number; lane: string | number }, options?: RequestOptions): Promise<void>;

  /** Remove the override of a limiter; declared limits hold again. */
  resetLimiter(parameters: { limiter: string | number }, options?: RequestOptions): Promise<void>;

  /** Start jobs of a lane again, within its limits. */
  resumeLane(parameters: { limiter: string | number; lane: string | number }, options?: RequestOptions): Promise<Lane>;

  /** Take the disk of this id out of use, so that it can be removed. Its cached data is lost. */
  retireMediaDisk(parameters: { disk: string | number }, options?: RequestOptions): Promise<Disk>;

  /** Make a failed, cancelled or quarantined job ready again. */
  retryJob(parameters: { job_id: string | number }, options?: RequestOptions): Promise<void>;

  /** Mark a pair as reviewed; both photos stay as they are. */
  reviewFetchDuplicate(parameters: { pair: string | number }, options?: RequestOptions): Promise<void>;

  /** Revoke all links to the page of a seller at once. */
  revokeFetchSellerLinks(parameters: { customer: string | number }, options?: RequestOptions): Promise<void>;

  /** Return the new secret, only once; the previous one also signs for a day. */
  rotateFetchWebhookSecret(parameters: { customer: string | number }, options?: RequestOptions): Promise<NewSecret>;

  /** Enqueue the cron's job now, in addition to its schedule. */
  runCron(parameters: { name: string | number }, options?: RequestOptions): Promise<JobAdded>;

  /** Read the body as the customer's catalogue, or fetch it from a URL. With `supplemental` the file overlays price and stock of items by id. It neither adds nor removes items, and an overlay stays until a file without the id is applied. An unreadable file is refused with the line, its content and a remedy, in the language of `lang`, else of `Accept-Language`. In a language other than English the `reason` of a held run is translated too. The response to an upload follows once the run is applied, held or dry. Its photos follow later; `GET /v1/fetch/runs/{run}` shows the progress. With `review` the run is held until it is confirmed, and then changes what it shows. Without a response, either nothing or the whole run was applied. The response to a URL is the run that waits for the file, or with `cron` the source. */
  runFetchCatalogue(parameters: { customer: string | number; dry_run?: boolean; review?: boolean; file_name?: string; format?: string | null; mapping?: string | null; lang?: string | null; supplemental?: boolean; body: Blob | ArrayBuffer | Uint8Array | ReadableStream<Uint8Array> | string }, options?: RequestOptions): Promise<Run | Source>;

  /** Send an event to every workflow that waits for it, now or later. */
  sendEvent(parameters: { body: EventToSend }, options?: RequestOptions): Promise<EventSent>;

  /** Upload up to 1,000 items, all or none; other items stay as they are. New and changed lists of photos are requested; without a request the result is published at once. A faulty item is listed in its run's errors and stays as it was. Without `fields` the stored ones stay; `gone` unpublishes the item. */
  sendFetchItems(parameters: { body: Array<SentItem> }, options?: RequestOptions): Promise<SentAnswer>;

  /** Change, pause or resume a cron. Fields left out stay. */
  setCron(parameters: { name: string | number; body: CronChange }, options?: RequestOptions): Promise<Cron>;

  /** Create a customer or change its limits, at once, for photos not started yet. Only this response contains the secret of a new webhook. */
  setFetchCustomer(parameters: { customer: string | number; body: CustomerLimits }, options?: RequestOptions): Promise<CustomerSet>;

  /** Set a mapping of column names; uploads and sources refer to it by `mapping`. */
  setFetchMapping(parameters: { name: string | number; body: Mapping }, options?: RequestOptions): Promise<NamedMapping>;

  /** Set the fields that rows of a category must have, from the next run on. */
  setFetchSchema(parameters: { category: string | number; body: Schema }, options?: RequestOptions): Promise<CategorySchema>;

  /** Set all limits of a lane; what is left out is unlimited. `create`: allow a new limiter. */
  setLane(parameters: { limiter: string | number; lane: string | number; create?: boolean; body: LaneLimits }, options?: RequestOptions): Promise<Lane>;

  /** Override the limits of a limiter, and so of its lanes without limits of their own. */
  setLimiter(parameters: { limiter: string | number; body: LimiterLimits }, options?: RequestOptions): Promise<Limiter>;

  /** Give the node a share of the keys of `weight` times that of a node of weight 1. */
  setMediaNodeWeight(parameters: { node: string | number; body: Weight }, options?: RequestOptions): Promise<NodeInfo>;

  /** Pause or resume a queue and override its settings; `create` makes one without code. */
  setQueue(parameters: { queue: string | number; create?: boolean; body: QueueChange }, options?: RequestOptions): Promise<QueueStatus>;

  /** Move the read marker forward, never back: with several devices the furthest one counts. */
  setReadMarker(parameters: { viewer: string | number; body: ReadUpTo }, options?: RequestOptions): Promise<Marker>;

  /** A URL that allows reading the object for `ttl_s` seconds (default: `media.url_ttl`). The object need not be stored. */
  signMediaUrl(parameters: { body: UrlToSign }, options?: RequestOptions): Promise<SignedUrl>;

  /** Use up starts of a lane's rate for other work than jobs, now or within `wait_max_s`. */
  spendLane(parameters: { limiter: string | number; lane: string | number; body: StartsToSpend }, options?: RequestOptions): Promise<StartsSpent>;

  /** Have all nodes log the requests with this tag, one line per answer. If it is traced already, the new end applies. */
  startMediaTrace(parameters: { body: TraceToStart }, options?: RequestOptions): Promise<Watch>;

  /** Start a workflow by name. */
  startWorkflow(parameters: { name: string | number; body: WorkflowToStart }, options?: RequestOptions): Promise<JobAdded>;

  /** Stop the trace of `tag`, or all traces. The answer lists the stopped ones. */
  stopMediaTraces(parameters?: { tag?: string | null }, options?: RequestOptions): Promise<Array<Watch>>;

  /** Take up to `n` due jobs for `lease`; wait up to `wait`, at most 30 s, for the first. */
  takeJobs(parameters: { queue: string | number; n?: number; lease?: string; wait?: string }, options?: RequestOptions): Promise<Taken>;

  /** Send a signed test message without results; return the receiver's response. */
  testFetchWebhook(parameters: { customer: string | number }, options?: RequestOptions): Promise<WebhookTrial>;

  /** End the block of an author */
  unblock(parameters: { viewer: string | number; author: string | number }, options?: RequestOptions): Promise<Changed>;

  /** End the block of `authors=a,b,c` */
  unblockMany(parameters: { viewer: string | number; authors: string }, options?: RequestOptions): Promise<Changed>;

  /** Restore the items to their state before a catalogue; return the run that does so. Added items are unpublished. Changed and removed items are published as before, as new versions. Items uploaded since stay as they are. */
  undoFetchRun(parameters: { run: string | number }, options?: RequestOptions): Promise<Run>;

  /** Start jobs on a drained host again. */
  undrainHost(parameters: { host: string | number }, options?: RequestOptions): Promise<void>;

  /** Cache on the disk of this id again. Idempotent. */
  undrainMediaDisk(parameters: { disk: string | number }, options?: RequestOptions): Promise<Disk>;

  /** Let the node serve its keys again. Idempotent. */
  undrainMediaNode(parameters: { node: string | number }, options?: RequestOptions): Promise<NodeInfo>;

  /** Unfollow an author: the next page has none of the author's posts. */
  unfollow(parameters: { viewer: string | number; author: string | number }, options?: RequestOptions): Promise<Changed>;

  /** Unfollow `authors=a,b,c`, or everyone with `all=true`. An unfollow cannot be undone, so unknown or repeated parameters and a body are refused. */
  unfollowMany(parameters: { viewer: string | number; authors?: string | null; all?: boolean }, options?: RequestOptions): Promise<Changed>;

  /** Delete the marks of a name, or only the one that begins at `from`. */
  unmarkItem(parameters: { id: string | number; name: string | number; from?: string | null }, options?: RequestOptions): Promise<Unmarked>;

  /** End the mute of an author */
  unmute(parameters: { viewer: string | number; author: string | number }, options?: RequestOptions): Promise<Changed>;

  /** End the mute of `authors=a,b,c` */
  unmuteMany(parameters: { viewer: string | number; authors: string }, options?: RequestOptions): Promise<Changed>;

  /** Compare a sample of viewers and authors with PostgreSQL; empty `differences`: all match. */
  verifyFeed(parameters?: { sample?: number }, options?: RequestOptions): Promise<FeedVerified>;

  /** Compare a share of what the node has cached with its checksums, and drop what is wrong. The answer is sent when all are checked. */
  verifyMedia(parameters: { body: ToVerify }, options?: RequestOptions): Promise<media_service_nodes_Verified>;

  /** Compare every total with the sum of its hours. Empty `differences` means that all match. */
  verifyViews(options?: RequestOptions): Promise<views_model_Verified>;

  /** Have every node that owns one of `keys` read it completely. Idempotent. The answer is sent when all nodes have finished or failed. */
  warmMedia(parameters: { body: ToWarm }, options?: RequestOptions): Promise<Warmed>;

  /** Send `posts` events with new posts, starting now, or after Last-Event-ID or `since=`. `kinds=` selects posts of these kinds. Deletions are not sent; pages reflect them. */
  watchFeed(parameters: { viewer: string | number; since?: string | null; kinds?: string | null }, options?: RequestOptions): Promise<Response>;

  /** Explain why a job is in its state. */
  whyJob(parameters: { job_id: string | number }, options?: RequestOptions): Promise<Why>;

}

export type Acked = { outcomes?: Record<string, TakenOutcome>; rest?: TakenOutcome | null };

export type Alert = { id: number; rule: string; subject: string; text: string; raised_at: string; cleared_at?: string | null };

export type AttemptCount = { week: string; time_class: string; outcome: string; up_to_s: number | null; attempts: number };

export type AuditLine = { id: number; at: string; actor: string; address: string; action: string; command: string; outcome: string; detail: string | null };

export type BackupRow = { id: string; generation: number; ended_at: string; until: string | null; stored_bytes: number; size_bytes: number; verified_at: string | null; fault: string };

export type BackupsState = { archive: string; folder: string; host: string; generation: number; behind_bytes: number | null; archived_until: string | null; is_late: boolean; verified_at: string | null; backups: Array<BackupRow>; unreadable: Record<string, string> };

export type BringAnswer = { customer: string; job: number };

export type Buckets = { bounds_s: Array<number>; counts: Array<Array<number> | null> };

export type BulkRequest = { action: string; filter: JobFilter; dry_run?: boolean; cursor?: string | null };

export type BulkResponse = { action: string; dry_run: boolean; matched: number; changed: number; skipped: number; more: boolean; next_cursor: string | null };

export type CategorySchema = { category: string; schema: Schema; updated_at: string };

export type ChangePage = { changes: Array<ExportRow>; position: string };

export type Changed = { changed: number };

export type ChangesAnswer = { changes: Array<fetch_model_Change>; next_after: string | null };

export type ClassPlan = { classes: Array<string>; shares: Array<number>; reserved_s: number; cut: number };

export type ClassWeek = { week: string; time_class: string; attempts: number; errors: number; by_outcome: Record<string, number> };

export type Consumer = { name: string; added_at: string; items: number };

export type ConsumersAnswer = { consumers: Array<Consumer> };

export type Cron = { name: string; spec: string; queue: string; tz?: string; payload?: unknown; priority?: number; next_at: string; last_at: string | null; last_job: number | null; paused: boolean; source: string; error: string | null };

export type CronChange = { spec?: string; queue?: string; tz?: string; payload?: unknown; priority?: number; paused?: boolean };

export type Customer = { customer: string; starts_max: number; window_s: number; connections: number; hold_share?: number | null; hold_items?: number | null; refresh_s?: number | null };

export type CustomerLimits = { starts_max?: number | null; window_s?: number | null; rate?: string | null; connections?: number; webhook?: WebhookTo | null; hold_share?: number | null; hold_items?: number | null; refresh_s?: number | null };

export type CustomerSet = { customer: string; starts_max: number; window_s: number; connections: number; hold_share?: number | null; hold_items?: number | null; refresh_s?: number | null; webhook?: string | null; webhook_secret?: string | null };

export type CustomersAnswer = { customers: Array<Customer> };

export type DayViewers = { day: string; viewers: number };

export type Decision = { id: number; at: string; version: number; host: string; queue: string; before: number; after: number; code: string; why: string };

export type Deleted = { id: string; total: number; until_at: string };

export type Difference = { id: string; traffic: Traffic; total: number; hours: number };

export type Disk = { id: string; path: string; size_bytes: number; frames: number; used: number; state: string; fault?: string; queue?: number; is_copied?: boolean; rotten?: number };

export type DiskToAdd = { path: string; size_bytes: number };

export type DuplicatesAnswer = { duplicates: Array<NearDuplicate>; next_cursor: string | null };

export type EntryNode = { name: string; address: string; dc: string; state: string; is_alive: boolean; weight: number };

export type ErrorKind = { code: string; title: string; kind: string; status: number; retryable: boolean; meaning: string };

export type EventSent = { is_first: boolean };

export type EventToSend = { name: string; key: string | number; payload?: unknown };

export type ExportPage = { rows: Array<ExportRow>; after: string | null };

export type ExportRow = { id: string; start_at: string; class: string; views: number };

export type Extended = { lease_id: number; expires_at: string };

/** One fault in the input. */
export type Fault = { pointer: string; code: string; text: string };

export type FeedDifference = { kind: string; entity: number | string; missing: number; extra: number };

export type FeedVerified = { viewers: number; authors: number; posts: number; follows: number; differences: Array<FeedDifference> };

export type FieldRule = { type?: "text" | "integer" | "number" | "price" | "boolean" | "date" | "url" | "list" | "one_of"; required?: boolean; least?: number | string | null; most?: number | string | null; length_least?: number | null; length_most?: number | null; pattern?: string | null; values?: Array<string> };

export type FileFault = { code: string; line?: number | null; values?: Record<string, string | number> };

export type FleetHost = { name: string; kind: string; tags: Array<string>; cores: number; capacity: number; load_per_core: number; is_draining: boolean; is_silent: boolean; jobs_ended: number; started_at: string; reported_at: string | null; slots: Array<HostSlot>; lost_at?: string | null; cpu_pressure?: number; planned?: Record<string, number> };

export type FleetLoad = { span_s: number; queues: Array<QueueLoad>; minutes: Array<FleetMinute> };

export type FleetMinute = { minute: string; done: number; failed: number; cancelled?: number; retried: number; run_s: number; wait_max_s: number; slot_s: number };

export type FleetState = { hosts: Array<FleetHost>; plan: PlanHead; decisions: Array<Decision>; alerts_open: number; alerts: Array<Alert> };

export type HashedPhoto = { customer: string; item: string; url: string; sha256: string; key: string; width: number; height: number; size_bytes: number };

export type Health = { alive: boolean };

export type HeldAnswer = { items: Array<HeldItem> };

export type HeldItem = { customer: string; id: string; version: number; reason: string; held_at: string; fields: Record<string, unknown>; photos: Array<ItemPhoto> };

export type HistoryAnswer = { from_at: string; to_at: string; step_s: number; is_recorded: Array<boolean>; hosts: Array<string>; centers: Array<string>; series: Array<SeriesHistory> };

export type HistoryLine = { label: string; values: Array<number | null> };

export type Host = { host: string; customer: string; starts_in: string; needs: Record<string, number>; mean_s: number | null; requests: number; photos_by_outcome: Record<string, number>; first_seen_at: string; last_seen_at: string; paused_until: string | null; crawl_delay_s: number | null };

export type HostSlot = { queue?: string | null; pid?: number; busy_s?: number };

export type HostsAnswer = { hosts: Array<Host> };

export type HotObject = { key: string; requests_per_s: number };

export type Index = { name: string; version: string; links: Record<string, string> };

export type ItemPhoto = { url: string; outcome: string; key?: string | null; sha256?: string | null; width?: number | null; height?: number | null; size_bytes?: number | null };

export type Job = { id: number; state: JobState; queue?: string | null; priority?: number | null; run_at?: string | null; attempt?: number; losses?: number; lane?: string | null; unique?: string | null; group_id?: number | null; host?: string | null; lease_id?: number | null; ended_at?: string | null; error?: string | null; traceback?: string | null; payload?: unknown; result?: unknown; progress?: JobProgress | null; retries?: number | null; timeout_s?: number | null; expires_at?: string | null; chain?: string | null; failure?: JobFailure | null };

export type JobAdded = { id: number };

export type JobEdited = { payload?: unknown; priority?: number | null; at?: string | null; after_s?: number | null };

export type JobFailure = { at: string; error: string };

export type JobFilter = { queue?: string | null; state?: string | null; lane?: string | null; q?: string | null; older_than_s?: number | null; from_at?: string | null; to_at?: string | null; ids?: Array<number> | null };

export type JobProgress = { ratio: number; text: string; at: string };

/** The state of a job. */
export type JobState = "scheduled" | "ready" | "leased" | "done" | "failed" | "cancelled" | "quarantined" | "gone";

export type JobToAdd = { payload?: unknown; at?: string | null; after_s?: number | null; priority?: number; unique?: string | null; lane?: string | null; spread_s?: number | null; version?: number; retries?: number | null; timeout_s?: number | null; expires_s?: number | null; unique_for_s?: number | null; chain?: string | null };

export type JobsAdded = { ids: Array<number> };

export type JobsListed = { jobs: Array<Job>; next_cursor: string | null };

export type Lane = { limiter: string; lane: string; starts_max: number | null; window_s: number | null; concurrency: number | null; paused: boolean; weight: number; waiting: number; inflight: number; starts_live: number; next_at: string | null; follows_limiter?: boolean };

export type LaneLimits = { starts_max?: number | null; window_s?: number | null; concurrency?: number | null; paused?: boolean; weight?: number };

export type Limiter = { limiter: string; starts_max: number | null; window_s: number | null; slack_s: number; concurrency: number | null; is_set: boolean; queues: Array<string> };

export type LimiterLimits = { starts_max?: number | null; window_s?: number | null; concurrency?: number | null; slack_s?: number };

export type Link = { customer: string; url: string; outcome: string; sha256: string | null; etag: string | null; last_modified: string | null; checked_at: string; failures: number; rounds_left: number; recheck_at: string | null; run: number; text: string };

export type Load = { name: string; dc: string; is_up: boolean; share_before: number; share_after: number; fair_share: number; sent_share: number };

export type Mapping = { id: string | Array<string>; name?: string | Array<string> | null; price?: string | Array<string> | null; category?: string | Array<string> | null; url?: string | Array<string> | null; photos?: string | Array<string>; fields?: Record<string, string | Array<string>>; others?: "keep" | "drop"; rows?: string | null; format?: string | null; encoding?: string | null; delimiter?: string | null };

export type MappingsAnswer = { mappings: Array<NamedMapping> };

export type Marker = { position?: string | null; post?: string | null; at?: string | null; set_at?: string | null };

export type MediaFolder = { prefix: string; folders: Array<string>; objects: Array<MediaObject>; next_after: string | null };

export type MediaObject = { key: string; size_bytes: number; etag: string; modified_at: string; content_type: string; url: string };

export type NamedMapping = { name: string; mapping: Mapping; updated_at: string };

export type NearDuplicate = { id: number; distance: number; found_at: string; reviewed_at: string | null; photos: Array<HashedPhoto> };

export type NewCron = { name: string; spec: string; queue: string; tz?: string; payload?: unknown; priority?: number };

export type NewHit = { id: string; n?: number; viewer?: string | null; event?: string | null; class?: Traffic | null; counters?: Array<string> };

export type NewMark = { name: string; from_at?: string | null; to_at?: string | null };

export type NewPost = { author: number | string; id: string; at?: string | null; ref?: string | null; kind?: string | null };

export type NewSecret = { customer: string; secret: string; old_until: string };

export type NewestResultsAnswer = { results: Array<Result>; next_cursor: string | null };

export type NodeInfo = { name: string; address: string; dc: string; weight: number; state: string; is_alive: boolean; share: number; started_at: string | null };

export type NodeWarmed = { node: string; blocks: number; failed: number; fault: string | null };

export type ObjectsAnswer = { objects: Array<MediaObject>; is_cut: boolean };

export type Owner = { name: string; address: string; dc: string; state: string };

export type Ownership = { key: string; partition: number; owners: Array<Owner> };

export type Page = { posts: Array<PagePost>; next_cursor?: string | null; newest?: string | null; is_slow?: boolean };

export type PagePost = { id: string; author: number | string; at: string; kind?: string | null };

export type People = { people: Array<Person>; total: number; next_cursor?: string | null };

export type Person = { id: number | string; since_at: string };

export type PhotoProblemAnswer = { item: string; url: string; outcome: string; text: string; position: number };

export type Plan = { nodes: Array<Load>; filled_share: number; unowned_share: number };

export type PlanHead = { leader: string | null; term: number; version: number; planned_at: string | null; is_led: boolean };

export type Post = { id: string; author: number | string; at: string; is_waiting?: boolean; ref?: string | null; kind?: string | null };

export type PostWhy = { viewer: number | string; post: string; is_shown: boolean; reasons: Array<Reason>; author?: number | string | null; at?: string | null; is_slow?: boolean };

/** An error document of RFC 9457 with our additional members. */
export type ProblemDocument = { type: string; title: string; status: number; detail: string; code: string; request_id: string | null; retryable: boolean; errors?: Array<Fault> };

export type ProblemAnswer = { row: number; line: number; item: string | null; field: string; code: string; values?: Record<string, string | number>; text?: string; position: number };

export type ProblemsAnswer = { problems: Array<ProblemAnswer>; photos: Array<PhotoProblemAnswer> };

export type Purged = { keys: Array<string>; prefix: string | null; generation: number };

export type QueueChange = { paused?: boolean; importance?: number | null; slots_min?: number | null; slots_max?: number | null; retries?: number | null; decisions?: Record<string, string | null> | null };

export type QueueHour = { done: number; failed: number; cancelled?: number; retried: number; lost: number; calls: number; claimed: number; run_s: number; wait_s: number; wait_max_s: number; slot_s: number; ready?: number | null; scheduled?: number | null; running?: number | null; failed_kept?: number | null; oldest_s?: number | null; hour: string };

export type QueueLoad = { done: number; failed: number; cancelled?: number; retried: number; lost: number; calls: number; claimed: number; run_s: number; wait_s: number; wait_max_s: number; slot_s: number; queue: string };

export type QueueMinute = { done: number; failed: number; cancelled?: number; retried: number; lost: number; calls: number; claimed: number; run_s: number; wait_s: number; wait_max_s: number; slot_s: number; ready?: number | null; scheduled?: number | null; running?: number | null; failed_kept?: number | null; oldest_s?: number | null; minute: string };

export type QueueStatus = { queue: string; limiter: string; paused: boolean; importance: number; slots_min: number; slots_max: number; retries: number; batch: number; timeout_s: number; tag: string | null; keep_done_s: number | null; keep_result: boolean; needs_lane: boolean; aliases: Array<string>; decisions: Record<string, string | null>; overridden: Record<string, unknown>; ready: number; scheduled: number; leased: number; failed: number; oldest_ready_age_s: number | null; ready_is_capped: boolean; scheduled_is_capped: boolean; failed_is_capped: boolean; slots: number; is_known: boolean };

export type QueueStep = { at: string; queue: string; done: number; failed: number; cancelled: number; retried: number; lost: number; ready: number };

export type ReadUpTo = { position: string };

export type Readiness = { ready: boolean; engines: Record<string, string>; reads?: string; roles?: Record<string, string>; warnings?: Array<string> };

export type Reason = { code: string; text: string; at?: string | null };

export type RebuildJob = { job: number };

export type Reclassify = { id: string; from_at: string; to_at: string; source: Traffic; target: Traffic };

export type ReclassifyJob = { job: number };

export type ReplayAnswer = { consumer: string; items: number };

export type Result = { customer: string; id: string; version: number; action: string; fields: Record<string, unknown>; photos: Array<ItemPhoto>; seq: number; at: string };

export type ResultsAnswer = { results: Array<Result>; next_after: number };

export type Run = { run: number; customer: string; state: RunState; file_name: string; format: string; reason: string | null; started_at: string; ended_at: string | null; rows: number; invalid: number; new: number; changed: number; unchanged: number; gone: number; problems: number; items_pending: number; photos: number; photos_pending: number; photos_by_outcome: Record<string, number>; photos_per_s?: number | null; eta_s?: number | null; sample?: Sample | null; undone_by?: number | null; can_undo?: boolean; items_late?: number; fault?: FileFault | null; review_until?: string | null };

/** State of a run. A file is fetched (`bringing`) and read; then the run is refused, held, dry, or applied until its items are published (`done`). A person confirms a held run or discards it (`superseded`). */
export type RunState = "bringing" | "reading" | "refused" | "abandoned" | "dry" | "held" | "superseded" | "applied" | "done";

export type RunsAnswer = { runs: Array<Run> };

export type Sample = { photos: Array<SampledPhoto>; expected_s: number };

export type SampledPhoto = { url: string; outcome: string; text: string; took_s: number };

export type Schema = { fields?: Record<string, FieldRule>; others?: "keep" | "drop"; category_fields?: Array<string> };

export type SchemasAnswer = { schemas: Array<CategorySchema> };

export type SellerLink = { customer: string; url: string; expires_at: string };

export type SellerLinkLife = { days?: number };

export type SentAnswer = { runs: Array<Run> };

export type SentItem = { customer: string; item: string; photos?: Array<string>; fields?: Record<string, string | number | boolean | null> | null; gone?: boolean };

export type SeriesHistory = { series: string; kind: string; unit: string; lines: Array<HistoryLine>; buckets?: Buckets | null };

export type SeriesPoint = { start_at: string; human?: number; bot?: number; owner?: number; staff?: number; counters?: Record<string, number> };

export type ShardLag = { shard: number; through: string; pending: number; oldest_s: number; flusher: string | null };

export type ShardState = { shard: number; state: string; floor_at?: string | null; newest_at?: string | null };

export type SignedUrl = { key: string; url: string; expires_at: string };

export type Source = { customer: string; url: string; cron: string; tz: string; format: string | null; mapping: string | null; next_at: string | null; tried_at: string | null; outcome: string | null; text: string | null; run: number | null; failures: number };

export type SourcesAnswer = { sources: Array<Source> };

export type StartsSpent = { wait_s: number | null };

export type StartsToSpend = { starts?: number; wait_max_s?: number };

export type Step = { number: number; name: string; kind: string; state: string; failures: number; begun_at: string; ended_at: string | null; wake_at: string | null; waits_for: string | null; jobs: Array<number>; error: string | null; result: unknown };

export type StoredItem = { customer: string; id: string; version: number; is_gone: boolean; run: number; fields: Record<string, unknown>; photos: Array<ItemPhoto>; supplemental?: Record<string, unknown> };

export type StoredTag = { id: string; size_bytes: number; title: string | null; artist: string | null; album: string | null; buyer: string | null; cover_bytes: number };

export type Study = { attempts: Array<AttemptCount>; times: Array<TimeCount>; quantiles: Record<string, number>; downloads: number; unfinished: number; weeks: Array<ClassWeek>; current: ClassPlan; options: Array<ClassPlan>; proposed: ClassPlan | null };

export type TagToPut = { title?: string | null; artist?: string | null; album?: string | null; cover?: string | null; buyer?: string | null };

export type Taken = { lease_id: number | null; jobs: Array<TakenJob>; expires_at: string | null };

export type TakenJob = { id: number; payload: unknown; priority: number; run_at: string; attempt: number; lane?: string | null; traceparent?: string | null; version?: number };

export type TakenOutcome = { outcome?: string; after_s?: number | null; why?: string; queue?: string | null; result?: unknown; decision?: string | null; by?: string };

export type TimeCount = { up_to_s: number; downloads: number };

export type ToPurge = { keys?: Array<string>; prefix?: string | null; dry_run?: boolean };

export type ToVerify = { share?: number };

export type ToWarm = { w?: number | null; h?: number | null; fit?: string | null; fm?: string | null; keys: Array<string> };

export type TopEntry = { id: string; views: number };

export type Total = { id: string; total: number | null; stale?: boolean; today?: number | null; unique?: number | null; classes?: Record<string, number> | null; counters?: Record<string, number> | null };

export type TraceToStart = { tag: string; for_s?: number };

/** Class of a viewer. Each class is counted separately; `total` counts humans only. */
export type Traffic = "human" | "bot" | "owner" | "staff";

export type Unmarked = { deleted: number };

export type Unread = { count: number; has_more?: boolean };

export type UrlCustomer = { customer: string; waiting_runs: Array<number>; job: Why | null; host: Host | null; lane: Lane | null; ahead: string };

export type UrlReport = { url: string; allowed: boolean; judgement: string; links: Array<Link>; customers: Array<UrlCustomer> };

export type UrlToSign = { w?: number | null; h?: number | null; fit?: string | null; fm?: string | null; key: string; ttl_s?: number | null; grid_s?: number; address?: string | null; rate?: number | null; tag?: string | null; trace?: string | null; prefer?: string | null };

export type Warmed = { keys: number; nodes: Array<NodeWarmed> };

export type Watch = { name: "user" | "request" | "object" | "trace"; value: string; ends_at: string };

export type Webhook = { customer: string; url: string; taken_seq: number; waiting: number; failures: number; failing_since: string | null; next_at: string | null; last_at: string | null; last_status: number | null; last_error: string | null; disabled_at: string | null; old_until: string | null; created_at: string };

export type WebhookReplay = { customer: string; after: number; waiting: number };

export type WebhookTo = { url: string };

export type WebhookTrial = { customer: string; url: string; is_accepted: boolean; status: number | null; text: string; took_s: number };

export type WebhooksAnswer = { webhooks: Array<Webhook> };

export type Weight = { weight: number };

export type Why = { job_id: number; state: JobState; reason: string; text: string; until_at?: string | null };

export type WorkflowCancelled = { running: Array<number> };

export type WorkflowRun = { id: number; workflow: string; version: number | null; state: JobState; begun_at: string | null; ended_at: string | null; error: string | null; payload: unknown; result: unknown; waits_for: string | null; steps: Array<Step> };

export type WorkflowToStart = { payload?: unknown; at?: string | null; after_s?: number | null; priority?: number; unique?: string | null; lane?: string | null; spread_s?: number | null; version?: number | null; retries?: number | null; timeout_s?: number | null; expires_s?: number | null; unique_for_s?: number | null; chain?: string | null };

export type fetch_model_Change = { item: string; kind: string; version: number; fields: Array<string>; values?: Record<string, Array<string | null>> };

export type media_http_cluster_Change = { lost?: Array<string>; drained?: Array<string>; weights?: Record<string, number> };

export type media_service_nodes_Verified = { blocks: number; right: number; wrong: number; unread: number };

export type views_model_Mark = { name: string; from_at: string; to_at?: string | null };

export type views_model_Verified = { entities: number; views: number; differences: Array<Difference> };

export type web_marks_Mark = { at: string; kind: string; text: string; within_s?: number; until_at?: string | null; host?: string; role?: string; count?: number; causes?: Record<string, number>; engines?: Array<string>; hosts?: Array<string>; cause?: string; is_open?: boolean };
