BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0300');
CREATE TABLE certificates (
	fingerprint VARCHAR(64) NOT NULL,
	party VARCHAR(16) NOT NULL,
	name VARCHAR(64) NOT NULL,
	not_before FLOAT NOT NULL,
	not_after FLOAT NOT NULL,
	added_at FLOAT NOT NULL,
	revoked_at FLOAT,
	reason VARCHAR,
	roles JSON NOT NULL,
	PRIMARY KEY (fingerprint)
);
CREATE TABLE consortia (
	number INTEGER NOT NULL,
	offered_at FLOAT NOT NULL,
	document VARCHAR NOT NULL,
	PRIMARY KEY (number)
);
CREATE TABLE interventions (
	id INTEGER NOT NULL,
	at FLOAT NOT NULL,
	action VARCHAR(16) NOT NULL,
	operator VARCHAR(64) NOT NULL,
	run VARCHAR(64),
	site VARCHAR(64),
	reason VARCHAR NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE rounds (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	size INTEGER NOT NULL,
	quorum INTEGER NOT NULL,
	enrolled INTEGER NOT NULL,
	opened_at FLOAT NOT NULL,
	closed_at FLOAT,
	state VARCHAR(64),
	aggregate VARCHAR(64),
	complete BOOLEAN,
	abandoned VARCHAR,
	scored BOOLEAN NOT NULL,
	aggregations INTEGER DEFAULT 0 NOT NULL,
	rolled_back BOOLEAN DEFAULT 0 NOT NULL,
	statistics JSON,
	PRIMARY KEY (run, round, attempt)
);
INSERT INTO "rounds" VALUES('kept',0,1,2,2,2,1.79595021490065693851e+09,1.79595021500896477703e+09,'0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',NULL,1,NULL,0,1,0,'{"prototype_min_distance": 1.111111088029502, "classes_covered": 0.0}');
INSERT INTO "rounds" VALUES('kept',1,1,2,2,2,1.79595021502003788951e+09,1.79595021766136837002e+09,'5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',NULL,1,NULL,1,1,0,'{"prototype_shift": 0.0034583413384841723, "prototype_min_distance": 1.0452030511488914, "classes_covered": 9.0}');
INSERT INTO "rounds" VALUES('kept',2,1,2,2,2,1.79595021769691300388e+09,1.79595022074393677715e+09,'210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',NULL,1,NULL,1,1,0,'{"prototype_shift": 0.002583830738072035, "prototype_min_distance": 0.9972776564802002, "classes_covered": 9.0}');
INSERT INTO "rounds" VALUES('kept',3,1,2,2,2,1.79595022077203035357e+09,NULL,NULL,NULL,NULL,NULL,0,0,0,NULL);
CREATE TABLE runs (
	run VARCHAR(64) NOT NULL,
	fingerprint VARCHAR(64) NOT NULL,
	recipe VARCHAR NOT NULL,
	position INTEGER NOT NULL,
	began_at FLOAT NOT NULL,
	ended_at FLOAT,
	outcome VARCHAR(16),
	reason VARCHAR,
	paused BOOLEAN DEFAULT 0 NOT NULL,
	PRIMARY KEY (run)
);
INSERT INTO "runs" VALUES('kept','ed3888d6cc743ae815f659f920e5c937bc48e6eea15e086476b293d3b548ce5f','{"name":"kept","seed":0,"rounds":5,"classes":10,"class_names":[],"input":{"shape":[1,8,8],"mean":[0.5],"std":[0.5],"fit":"exact","colours":"exact","window":null},"method":{"name":"fednh","scale":1.0},"model":{"name":"mlp","pretrained_body":null,"hidden":[16]},"plan":{"epochs":60,"batch_size":4,"drop_last":false,"loss":"cross-entropy","tau":1.0,"sampling":"shuffled","optimizer":"sgd","lr":0.01,"momentum":0.9,"weight_decay":0.0,"schedule":"constant","lr_decay":1.0,"lr_steps":[0.5,0.75],"warmup_rounds":0,"max_grad_norm":null,"augmentation":"none","amp":true,"buffers":"averaged","checkpoint":false,"dp":null},"federation":{"min_sites":2,"participation":1.0,"over_selection":1.0,"quorum":1.0,"deadline_s":600.0,"grace":0.5,"required_sites":[],"min_contributors":2,"stall_timeout_s":120.0,"max_attempts":5,"site_wait_timeout_s":604800.0,"max_update_norm":1000000000.0,"max_model_mb":512.0,"max_relative_norm":50.0,"outlier_factor":20.0,"robust":"none","max_bad_sites":1,"max_weight_ratio":4.0,"score_every":1,"score_personal_every":null,"best_by":null,"patience":null,"min_improvement":0.0,"score_deadline_s":600.0,"heartbeat_s":1.0,"secure":false,"sum_step_s":60.0,"sum_group":3},"evaluation":{"frequency_groups":false,"probabilities":false,"personal_test_images":null,"class_order":[]}}',1,1.79595021232943367959e+09,NULL,NULL,NULL,0);
CREATE TABLE score_sums (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	name VARCHAR(64) NOT NULL,
	mean FLOAT NOT NULL,
	sites INTEGER NOT NULL,
	PRIMARY KEY (run, round, attempt, name)
);
CREATE TABLE scores (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	name VARCHAR(64) NOT NULL,
	value FLOAT NOT NULL,
	PRIMARY KEY (run, round, attempt, site, name)
);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.balanced_accuracy',6.01923076923076783018e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.pm_l',8.98609899539643763866e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.accuracy',6.0192307692307689404e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.pm_v',6.62393162393162371337e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.balanced_accuracy',0.65);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.pm_l',8.75786714699164914321e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.accuracy',0.65);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.pm_v',0.65);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.balanced_accuracy',8.96153846153846189714e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.pm_l',9.74442089674994349479e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.accuracy',8.96153846153846189714e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.pm_v',9.44444444444444419772e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.balanced_accuracy',8.84615384615384692246e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.pm_l',9.45337995941509690034e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.accuracy',8.84615384615384581223e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.pm_v',8.84615384615384581223e-01);
CREATE TABLE sites (
	site VARCHAR(64) NOT NULL,
	roles JSON NOT NULL,
	excluded VARCHAR,
	PRIMARY KEY (site)
);
INSERT INTO "sites" VALUES('site-1','["trainer"]',NULL);
INSERT INTO "sites" VALUES('site-2','["trainer"]',NULL);
CREATE TABLE sum_groups (
	id INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	first VARCHAR(64) NOT NULL,
	formed_at FLOAT NOT NULL,
	dissolved_at FLOAT,
	PRIMARY KEY (id)
);
CREATE TABLE tasks (
	task_id VARCHAR(64) NOT NULL,
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	kind VARCHAR(16) NOT NULL,
	base_digest VARCHAR(64),
	base_bytes INTEGER NOT NULL,
	task_status VARCHAR(16) NOT NULL,
	reason VARCHAR NOT NULL,
	sum_of VARCHAR(16),
	PRIMARY KEY (task_id)
);
INSERT INTO "tasks" VALUES('96965af3e8ad2e06b89029d617acabca','kept',0,1,'site-1','initialise',NULL,0,'reported','',NULL);
INSERT INTO "tasks" VALUES('0a20c251319b82bcf117abeddf3a75e7','kept',0,1,'site-2','initialise',NULL,0,'reported','',NULL);
INSERT INTO "tasks" VALUES('3f76057ca75675eb3f388ecdc96f258d','kept',1,1,'site-1','fit','0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('6f8d1631a304b304e25b2b2bdb26bab3','kept',1,1,'site-2','fit','0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('6e292759f8b493092ed8a7277bf687fa','kept',1,1,'site-1','score','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('a4316ec458b797b5164a6663cac82033','kept',1,1,'site-2','score','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('6a6885f40f459a6b856638b98e0edad8','kept',2,1,'site-1','fit','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('5921ca37d03007108e78efd6c06ff13c','kept',2,1,'site-2','fit','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('0d8d41bcc3be7632f432bdeea0648d76','kept',2,1,'site-1','score','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('48f811a8f722e862d642d7194b81b911','kept',2,1,'site-2','score','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('dc5f26f94fff2be263f24008f240aed2','kept',3,1,'site-1','fit','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'started','',NULL);
INSERT INTO "tasks" VALUES('08b1eb79b75c38e79091ecb58e6d22a7','kept',3,1,'site-2','fit','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'started','',NULL);
CREATE TABLE updates (
	id INTEGER NOT NULL,
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	task_id VARCHAR(64) NOT NULL,
	verdict VARCHAR(16) NOT NULL,
	code VARCHAR(24) DEFAULT '' NOT NULL,
	reason VARCHAR NOT NULL,
	digest VARCHAR(64) NOT NULL,
	bytes INTEGER NOT NULL,
	metrics JSON NOT NULL,
	weight FLOAT,
	norm FLOAT,
	rejected VARCHAR,
	record_hash VARCHAR(64) NOT NULL,
	at FLOAT NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "updates" VALUES(1,'kept',0,1,'site-1','96965af3e8ad2e06b89029d617acabca','accepted','','','90fb25ec9cc17a6e8756084f2729d82adf55fb6769fbb984e1664e35832899f2',5144,'{}',NULL,3.06656087183091274894e+00,NULL,'5b16b8f2486efe7ff455e2b0938069799cca2daeee78e4b9caa288c441e11a50',1.79595021496397948268e+09);
INSERT INTO "updates" VALUES(2,'kept',0,1,'site-2','0a20c251319b82bcf117abeddf3a75e7','accepted','','','90fb25ec9cc17a6e8756084f2729d82adf55fb6769fbb984e1664e35832899f2',5144,'{}',NULL,3.06656087183091274894e+00,NULL,'496b00cbe758be56ae093925ac26ef84857c2d29d2fc121b887ca9b73f3b5892',1.79595021499003076556e+09);
INSERT INTO "updates" VALUES(3,'kept',1,1,'site-2','6f8d1631a304b304e25b2b2bdb26bab3','accepted','','','9271cbaab4612da5b33b5777e468b93527baccd3dbd39445f01540e433d8a017',5740,'{"loss": 0.41883310645517674}',NULL,1.72754466835384086205e+01,NULL,'752107dbe308ffe70e5840732f57825e3324c4ab334d0208d200b374aff9a4b3',1.79595021740480947488e+09);
INSERT INTO "updates" VALUES(4,'kept',1,1,'site-1','3f76057ca75675eb3f388ecdc96f258d','accepted','','','7b80ee83d62520d3a73dbcc94a5b8a6683066506417fb7563f960576b5882c90',5612,'{"loss": 0.27874232889316586}',NULL,1.68067501865409774097e+01,NULL,'e94e59550568ffb3eb1731ebe60241b687d675c083f8bcead9c3bfd09640d096',1.79595021765519905097e+09);
INSERT INTO "updates" VALUES(5,'kept',2,1,'site-1','6a6885f40f459a6b856638b98e0edad8','accepted','','','ef80b18c37b7b5d34a7dc1cb341196a2aecae39f2b8daca192473440507c7f99',5612,'{"loss": 0.059827827441247976}',NULL,1.15662750016579121139e+01,NULL,'c67465497d26fc46a51ee2672219a7fef84fcbe97711c7608d9915715fc2345a',1.79595022027078819269e+09);
INSERT INTO "updates" VALUES(6,'kept',2,1,'site-2','5921ca37d03007108e78efd6c06ff13c','accepted','','','e58c50aba52caabc7ab78d4ac438969b83f91c720fd5ac8f41b3548829fa34b9',5740,'{"loss": 0.021818776756826072}',NULL,6.14246342280202117791e+00,NULL,'37d4ea67fa638fff234ea23da60cb70c23e336d19778201fd21fcea24b1e87ab',1.79595022073824262618e+09);
CREATE INDEX tasks_of_round ON tasks (run, round);
CREATE UNIQUE INDEX one_update_a_task ON updates (task_id) WHERE verdict = 'accepted';
CREATE INDEX updates_of_round ON updates (run, round);
CREATE INDEX updates_of_task ON updates (task_id);
CREATE INDEX updates_of_site ON updates (run, site, round);
CREATE UNIQUE INDEX one_group_a_site ON sum_groups (site) WHERE dissolved_at IS NULL;
COMMIT;
